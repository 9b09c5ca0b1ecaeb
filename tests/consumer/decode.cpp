// The C++ wrapper in a user's hands: quantises one token, decodes it, and compares with what was put in. Exits 0 if it
// comes back as it was (the values are exact in every step) and if an error arrives as an exception with its message.
#include <chiasma/chiasma.hpp>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kPage = 64;
constexpr std::int64_t kHeads = 3;
constexpr std::int64_t kRowBytes = 656;
constexpr std::int64_t kKeyDim = 576;
constexpr std::int64_t kValueDim = 512;
constexpr auto kOne = static_cast<chiasma::Bfloat16>(0x3f80);

int decode_what_was_quantized() {
  std::vector<chiasma::Bfloat16> kv(kKeyDim, kOne), q(kHeads * kKeyDim, kOne), out(kHeads * kValueDim);
  std::vector<std::uint8_t> cache(kPage * kRowBytes);
  std::vector<float> lse(kHeads);
  const std::int64_t slot = 5;
  const std::vector<std::int32_t> indices = {-1, 5, -1};

  chiasma_quantize_args quantize{};
  quantize.format = CHIASMA_KV_V32;
  quantize.scale = CHIASMA_SCALE_POW2;
  quantize.kv = chiasma::tensor(std::span(kv), {1, kKeyDim});
  quantize.slot_mapping = chiasma::tensor(std::span(&slot, 1), {1});
  quantize.kv_cache = chiasma::tensor(std::span(cache), {1, kPage, kRowBytes});
  chiasma::quantize(quantize);

  chiasma_decode_args args = chiasma::decode_args(CHIASMA_KV_V32);
  args.q = chiasma::tensor(std::span(q), {1, 1, kHeads, kKeyDim});
  args.kv_cache = quantize.kv_cache;
  args.indices = chiasma::tensor(std::span(indices), {1, 1, 3});
  args.out = chiasma::tensor(std::span(out), {1, 1, kHeads, kValueDim});
  args.lse = chiasma::tensor(std::span(lse), {1, 1, kHeads});
  chiasma::decode_on_cpu(args);

  int wrong = 0;
  for (const auto value : out) wrong += value != kOne;
  // One token: lse is its score, 576 * 576^-1/2.
  for (const float value : lse) wrong += value < 23.999f || value > 24.001f;
  return wrong;
}

bool reports_errors() {
  try {
    chiasma::DecodePlan(chiasma::decode_args(CHIASMA_KV_V32));
  } catch (const chiasma::Error& error) {
    return error.status() == CHIASMA_INVALID_ARGUMENT && !std::string(error.what()).empty();
  }
  return false;
}

}  // namespace

int main() {
  const int wrong = decode_what_was_quantized();
  std::printf("%d wrong values\n", wrong);
  return wrong == 0 && reports_errors() ? 0 : 1;
}
