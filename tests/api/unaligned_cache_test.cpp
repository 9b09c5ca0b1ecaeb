// On the CPU a cache may begin at any address, and its pages be any distance apart: files put tensors anywhere. Every
// operation has the bits that it has for an aligned cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "chiasma/chiasma.hpp"
#include "format/kv_format.h"
#include "format/numbers.h"

namespace chiasma::test {
namespace {

constexpr std::int64_t kB = 2, kHeads = 3, kTopk = 19, kPages = 4, kPage = 5;
constexpr std::int64_t kSlots = kPages * kPage;

template <typename T>
std::size_t bytes_of(const std::vector<T>& values) {
  return values.size() * sizeof(T);
}
template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), bytes_of(a)) == 0;
}

std::vector<std::uint16_t> random_bf16s(std::size_t count) {
  std::mt19937 random(5);
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& value : values) value = to_bf16(std::normal_distribution<float>()(random)).bits;
  return values;
}

// A quantised cache of one format, `offset` bytes behind a multiple of 16 and with pages `gap` elements further apart
// than they need be.
class PlacedCache {
 public:
  PlacedCache(KvFormat format, std::size_t offset, std::int64_t gap) : format_(format) {
    const bool is_bytes = traits_of(format).is_quantized();
    const std::int64_t element_bytes = is_bytes ? 1 : 2;
    const std::int64_t page_elements = min_page_bytes(format, kPage) / element_bytes + gap;
    storage_.assign(static_cast<std::size_t>(kPages * page_elements * element_bytes) + 32, 0xa5);
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    std::uint8_t* begin = storage_.data() + (16 - address % 16) % 16 + offset;
    tensor_ = tensor(begin, is_bytes ? CHIASMA_UINT8 : CHIASMA_BFLOAT16, kCpu, {kPages, kPage, token_extent(format)});
    tensor_.stride[0] = page_elements;
  }

  const chiasma_tensor& view() const { return tensor_; }
  void quantize_into() {
    const std::vector<std::uint16_t> kv = random_bf16s(static_cast<std::size_t>(kSlots * key_dim(format_)));
    chiasma_quantize_args args{};
    args.format = static_cast<chiasma_kv_format>(format_);
    args.scale = CHIASMA_SCALE_POW2;
    args.kv_scale = scale();
    args.kv = tensor(kv.data(), CHIASMA_BFLOAT16, kCpu, {kSlots, key_dim(format_)});
    args.kv_cache = tensor_;
    check(chiasma_quantize(&args, nullptr));
  }
  double scale() const { return traits_of(format_).scale_type == ScaleType::cache ? 0.01 : 0; }

 private:
  KvFormat format_;
  std::vector<std::uint8_t> storage_;
  chiasma_tensor tensor_{};
};

// What is computed from a cache.
struct Results {
  std::vector<std::uint16_t> out = std::vector<std::uint16_t>(kB * kHeads * 512);
  std::vector<float> lse = std::vector<float>(kB * kHeads);
  std::vector<double> exact = std::vector<double>(kB * kHeads * 512);
  std::vector<float> all, gathered;
};

Results results_of(KvFormat format, const PlacedCache& cache) {
  Results results;
  const std::int64_t dim = key_dim(format);
  const std::vector<std::uint16_t> q = random_bf16s(static_cast<std::size_t>(kB * kHeads * dim));
  std::vector<std::int32_t> indices(kB * kTopk);
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int32_t>(i * 7 % (kSlots + 2)) - 1;
  chiasma_decode_args decode{};
  decode.format = static_cast<chiasma_kv_format>(format);
  decode.sm_scale = 0.05;
  decode.kv_scale = cache.scale();
  decode.q = tensor(q.data(), CHIASMA_BFLOAT16, kCpu, {kB, 1, kHeads, dim});
  decode.kv_cache = cache.view();
  decode.indices = tensor(indices.data(), CHIASMA_INT32, kCpu, {kB, 1, kTopk});
  std::vector<double> exact_lse(kB * kHeads);
  check(chiasma_decode_oracle(&decode, nullptr, kB, results.exact.data(), exact_lse.data(), nullptr, nullptr));
  decode.out = tensor(results.out.data(), CHIASMA_BFLOAT16, kCpu, {kB, 1, kHeads, 512});
  decode.lse = tensor(results.lse.data(), CHIASMA_FLOAT32, kCpu, {kB, 1, kHeads});
  decode_on_cpu(decode);

  results.all.resize(static_cast<std::size_t>(kSlots * dim));
  chiasma_dequantize_args dequantize{decode.format, cache.scale(), cache.view(), {}};
  dequantize.kv = tensor(results.all.data(), CHIASMA_FLOAT32, kCpu, {kPages, kPage, dim});
  check(chiasma_dequantize(&dequantize, nullptr));

  results.gathered.resize(static_cast<std::size_t>(kTopk * dim));
  chiasma_gather_args gather{};
  gather.format = decode.format;
  gather.kv_scale = cache.scale();
  gather.kv_cache = cache.view();
  gather.slots = tensor(indices.data(), CHIASMA_INT32, kCpu, {kTopk});
  gather.kv = tensor(results.gathered.data(), CHIASMA_FLOAT32, kCpu, {kTopk, dim});
  check(chiasma_gather_dequantize(&gather, nullptr));
  return results;
}

TEST(UnalignedCache, EveryOperationHasTheBitsOfAnAlignedOne) {
  for (const KvFormat format : kAllFormats) {
    PlacedCache aligned(format, 0, 8);
    aligned.quantize_into();
    const Results expected = results_of(format, aligned);
    EXPECT_TRUE(std::ranges::any_of(expected.out, [](std::uint16_t value) { return (value & 0x7fff) != 0; }));
    for (std::size_t offset = 0; offset < 16; ++offset) {
      PlacedCache placed(format, offset, static_cast<std::int64_t>(offset) % 4);
      placed.quantize_into();
      const Results results = results_of(format, placed);
      SCOPED_TRACE(std::string(format_name(format)) + " offset " + std::to_string(offset));
      EXPECT_TRUE(same_bits(results.out, expected.out));
      EXPECT_TRUE(same_bits(results.lse, expected.lse));
      EXPECT_TRUE(same_bits(results.exact, expected.exact));
      EXPECT_TRUE(same_bits(results.all, expected.all));
      EXPECT_TRUE(same_bits(results.gathered, expected.gathered));
    }
  }
}

// Without a GPU too: what is wrong with an address is found before a device is asked for.
TEST(UnalignedCache, OnCudaItIsRefused) {
  std::vector<std::uint8_t> storage(kSlots * 656 + 32);
  const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
  std::vector<float> kv(kSlots * 576);
  chiasma_dequantize_args args{};
  args.format = CHIASMA_KV_V32;
  args.kv_cache =
      tensor(storage.data() + (16 - address % 16) % 16 + 8, CHIASMA_UINT8, cuda_device(1), {kPages, kPage, 656});
  args.kv = tensor(kv.data(), CHIASMA_FLOAT32, cuda_device(1), {kPages, kPage, 576});
  EXPECT_EQ(chiasma_dequantize(&args, nullptr), CHIASMA_INVALID_ARGUMENT);
  const std::string message = chiasma_last_error();
  for (const char* part : {"kv_cache starts at address", "multiple of 16", "CUDA device"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace chiasma::test
