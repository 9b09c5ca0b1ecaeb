// Small examples whose right answers can be worked out by hand, through the public C interface: every decode example
// against the oracle and every kernel that this machine can run, then the quantiser's and the merge's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "chiasma/chiasma.hpp"
#include "format/kv_format.h"
#include "format/numbers.h"
#include "format/quantize_tile.h"

namespace chiasma::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kPage = 64;
constexpr std::int32_t kSlot = 5;

// A v32 cache, b = s_q = 1. Starts as the base of all examples: one page, q = 0, sm_scale 1, RoPE 0, slot 5 selected by
// the first of 64 entries.
struct Example {
  explicit Example(int num_heads = 64, int pages = 1)
      : h_q(num_heads),
        num_pages(pages),
        q(static_cast<std::size_t>(num_heads) * v32::kKeyDim, bf16_t{0}),
        cache(static_cast<std::size_t>(pages) * kPage * v32::kRowBytes / sizeof(Block)),
        indices(64, -1) {
    indices[0] = kSlot;
  }

  std::byte* row(std::int32_t slot) { return reinterpret_cast<std::byte*>(cache.data()) + slot * v32::kRowBytes; }

  // One code in all 512 places, one scale a tile.
  void set_slot(std::int32_t slot, std::uint8_t code, std::vector<float> scales) {
    std::memset(row(slot), code, v32::kNopeDim);
    std::memcpy(row(slot) + v32::kScalesOffset, scales.data(), 16);
  }

  chiasma_decode_args args() const {
    chiasma_decode_args args = decode_args(CHIASMA_KV_V32);
    args.sm_scale = sm_scale;
    args.q = tensor(q.data(), CHIASMA_BFLOAT16, kCpu, {1, 1, h_q, v32::kKeyDim});
    args.kv_cache = tensor(cache.data(), CHIASMA_UINT8, kCpu, {num_pages, kPage, v32::kRowBytes});
    args.indices = tensor(indices.data(), CHIASMA_INT32, kCpu, {1, 1, static_cast<std::int64_t>(indices.size())});
    if (!sinks.empty()) args.attn_sink = tensor(sinks.data(), CHIASMA_FLOAT32, kCpu, {h_q});
    return args;
  }

  struct alignas(16) Block {
    std::byte bytes[16];
  };
  int h_q, num_pages;
  double sm_scale = 1.0;
  std::vector<bf16_t> q;
  std::vector<Block> cache;
  std::vector<std::int32_t> indices;
  std::vector<float> sinks;
};

struct Decoded {
  std::vector<float> out;  // [h_q, 512], bf16 values
  std::vector<float> lse;  // [h_q]
};

// Whatever turns a call into a result: the oracle, or a kernel. All tensors of the call are on the CPU.
struct Decoder {
  std::string name;
  std::function<Decoded(const chiasma_decode_args&)> run;
  friend void PrintTo(const Decoder& decoder, std::ostream* stream) { *stream << decoder.name; }
};

Decoded run_oracle(const chiasma_decode_args& args) {
  const std::size_t heads = static_cast<std::size_t>(args.q.shape[2]);
  std::vector<double> out(heads * kValueDim), lse(heads);
  check(chiasma_decode_oracle(&args, nullptr, 1, out.data(), lse.data(), nullptr, nullptr));
  Decoded result;
  for (const double value : out) result.out.push_back(to_float(to_bf16(static_cast<float>(value))));
  for (const double value : lse) result.lse.push_back(static_cast<float>(value));
  return result;
}

Decoded run_cpu_kernel(const std::string& kernel, chiasma_decode_args args) {
  const std::int64_t heads = args.q.shape[2];
  std::vector<bf16_t> out(static_cast<std::size_t>(heads * kValueDim), bf16_t{0x7fc1});
  Decoded result;
  result.lse.assign(static_cast<std::size_t>(heads), -777.0f);
  args.out = tensor(out.data(), CHIASMA_BFLOAT16, kCpu, {1, 1, heads, kValueDim});
  args.lse = tensor(result.lse.data(), CHIASMA_FLOAT32, kCpu, {1, 1, heads});
  chiasma_plan_options options{};
  options.kernel = kernel.c_str();
  decode_on_cpu(args, options);
  for (const bf16_t value : out) result.out.push_back(to_float(value));
  return result;
}

std::vector<Decoder> decoders() {
  std::vector<Decoder> found = {{"oracle", run_oracle}};
  for (const chiasma_kernel_info& kernel : kernels()) {
    if (kernel.device_kind != CHIASMA_CPU) continue;
    const std::string name = kernel.name;
    found.push_back({name, [name](const chiasma_decode_args& args) { return run_cpu_kernel(name, args); }});
  }
  return found;
}

class Contract : public testing::TestWithParam<Decoder> {
 protected:
  Decoded decode(const Example& example) { return GetParam().run(example.args()); }

  // The same value in all of out, the same lse for all heads.
  void expect(const Example& example, float value, double lse) {
    expect_tiles(example, {value, value, value, value}, lse);
  }

  void expect_tiles(const Example& example, const std::vector<float>& tiles, double lse) {
    const Decoded result = decode(example);
    for (std::size_t i = 0; i < result.out.size(); ++i) {
      ASSERT_EQ(result.out[i], tiles[i % kValueDim / v32::kTileDim])
          << "head " << i / kValueDim << ", " << i % kValueDim;
    }
    for (const float value : result.lse) {
      if (std::isinf(lse))
        ASSERT_EQ(value, lse);
      else
        ASSERT_NEAR(value, lse, 1e-6);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Decoders, Contract, testing::ValuesIn(decoders()),
                         [](const auto& decoder) { return decoder.param.name; });

TEST_P(Contract, ScalesAreHonouredExactly) {
  Example example;
  example.set_slot(kSlot, 0x38, {1.75f, 0.3f, 1.00390625f, 0x1p-13f});
  expect_tiles(example, {1.75f, 0.30078125f, 1.0f, 0x1p-13f}, 0.0);
}

TEST_P(Contract, AScaleIsNotRoundedToBf16) {
  Example example;
  example.set_slot(kSlot, 0x7e, {1.00390625f, 1.00390625f, 1.00390625f, 1.00390625f});
  expect(example, 450.0f, 0.0);
}

TEST_P(Contract, AWholeBlockOfMaskedEntriesMayComeFirst) {
  Example example;
  example.set_slot(kSlot, 0x38, {1.5f, 2.5f, -3.0f, 4.0f});
  example.indices.assign(128, -1);
  example.indices[64] = kSlot;
  expect_tiles(example, {1.5f, 2.5f, -3.0f, 4.0f}, 0.0);
}

TEST_P(Contract, ADuplicateCountsTwice) {
  Example example;
  example.set_slot(kSlot, 0x38, {1.5f, 2.5f, -3.0f, 4.0f});
  example.indices[1] = kSlot;
  expect_tiles(example, {1.5f, 2.5f, -3.0f, 4.0f}, std::log(2.0));
}

TEST_P(Contract, EqualScoresGiveTheMean) {
  for (const int n : {2, 3, 7, 64}) {
    Example example;
    for (std::int32_t slot = 0; slot < n; ++slot) {
      const float value = static_cast<float>(2 * slot);  // mean n - 1
      example.set_slot(slot, 0x38, {value, -value, value / 2, 1.0f});
      example.indices[static_cast<std::size_t>(63 - slot)] = slot;
    }
    if (n < 64) example.indices[0] = -1;
    const float mean = static_cast<float>(n - 1);
    expect_tiles(example, {mean, -mean, mean / 2, 1.0f}, std::log(n));
  }
}

TEST_P(Contract, SinkScalesOutAndLeavesLseAlone) {
  const std::pair<float, float> sinks[] = {{0.0f, 0.5f}, {kInfinity, 0.0f}, {-kInfinity, 1.0f}};
  for (const auto& [sink, factor] : sinks) {
    Example example;
    example.set_slot(kSlot, 0x38, {1.5f, 2.5f, -3.0f, 4.0f});
    example.sinks.assign(64, sink);
    expect_tiles(example, {factor * 1.5f, factor * 2.5f, factor * -3.0f, factor * 4.0f}, 0.0);
  }
}

TEST_P(Contract, NoValidEntryGivesZeroAndMinusInfinity) {
  for (const float sink : {0.0f, kInfinity, -kInfinity}) {
    Example example;
    example.set_slot(kSlot, 0x7f, {kInfinity, kInfinity, kInfinity, kInfinity});
    example.indices[0] = 64;  // the first slot that does not exist
    example.sinks.assign(64, sink);
    expect(example, 0.0f, -std::numeric_limits<double>::infinity());
  }
}

// Random queries and rows; scores of deviation near 1.
Example random_example(int h_q, std::int64_t topk, std::uint32_t seed) {
  constexpr int kPages = 40;
  std::mt19937 random(seed);
  Example example(h_q, kPages);
  example.sm_scale = 1.0 / 24;
  for (std::int32_t slot = 0; slot < kPages * kPage; ++slot) {
    std::vector<float> scales;
    for (int tile = 0; tile < v32::kNumTiles; ++tile) {
      scales.push_back(std::uniform_real_distribution<float>(0.2f, 0.5f)(random));
    }
    example.set_slot(slot, 0, scales);
    for (int c = 0; c < v32::kNopeDim; ++c) {
      example.row(slot)[c] = static_cast<std::byte>(float_to_e4m3(std::normal_distribution<float>(0, 3)(random)));
    }
  }
  for (bf16_t& value : example.q) value = to_bf16(std::normal_distribution<float>()(random));
  example.indices.clear();
  for (std::int64_t entry = 0; entry < topk; ++entry) {
    example.indices.push_back(static_cast<std::int32_t>(random() % (kPages * kPage)));
  }
  return example;
}

TEST_P(Contract, FewerHeadsGiveTheRowsOfTheFullRun) {
  const Example full = random_example(128, 200, 7);
  const Decoded expected = decode(full);
  for (const int h_q : {1, 8, 16, 32, 96}) {
    Example fewer = full;
    fewer.h_q = h_q;
    const Decoded actual = decode(fewer);
    for (std::size_t i = 0; i < actual.out.size(); ++i)
      ASSERT_EQ(actual.out[i], expected.out[i]) << h_q << " heads, " << i;
    for (std::size_t h = 0; h < actual.lse.size(); ++h) ASSERT_EQ(actual.lse[h], expected.lse[h]) << h_q << " heads";
  }
}

// The padded run may be divided differently, so that sums come in another order: equal up to one bf16 step.
TEST_P(Contract, AnyTopkGivesWhatThePaddedRunGives) {
  for (const std::int64_t topk : {1, 63, 65, 2047, 2051, 2176}) {
    const Example example = random_example(16, topk, 8);
    Example padded = example;
    padded.indices.resize(2304, -1);
    const Decoded actual = decode(example), expected = decode(padded);
    for (std::size_t i = 0; i < actual.out.size(); ++i) {
      ASSERT_NEAR(actual.out[i], expected.out[i], std::fabs(expected.out[i]) * 0x1p-7f + 1e-5f) << "topk " << topk;
    }
    for (std::size_t h = 0; h < actual.lse.size(); ++h) ASSERT_NEAR(actual.lse[h], expected.lse[h], 1e-5) << topk;
  }
}

// ---- quantiser ----

struct QuantizedTile {
  float scale;
  std::uint8_t byte;
  float back;
};

// Quantises and dequantises one row that holds `value` throughout.
QuantizedTile through_cache(float value, chiasma_scale_mode mode) {
  const std::vector<bf16_t> kv(v32::kKeyDim, to_bf16(value));
  std::vector<Example::Block> cache(v32::kRowBytes / sizeof(Example::Block));
  std::vector<float> back(v32::kKeyDim);
  chiasma_quantize_args quantize_args{};
  quantize_args.format = CHIASMA_KV_V32;
  quantize_args.scale = mode;
  quantize_args.kv = tensor(kv.data(), CHIASMA_BFLOAT16, kCpu, {1, v32::kKeyDim});
  quantize_args.kv_cache = tensor(cache.data(), CHIASMA_UINT8, kCpu, {1, 1, v32::kRowBytes});
  quantize(quantize_args);
  chiasma_dequantize_args dequantize_args{};
  dequantize_args.format = CHIASMA_KV_V32;
  dequantize_args.kv_cache = quantize_args.kv_cache;
  dequantize_args.kv = tensor(back.data(), CHIASMA_FLOAT32, kCpu, {1, 1, v32::kKeyDim});
  dequantize(dequantize_args);
  const auto* row = reinterpret_cast<const std::byte*>(cache.data());
  QuantizedTile result{0.0f, std::to_integer<std::uint8_t>(row[0]), back[0]};
  std::memcpy(&result.scale, row + v32::kScalesOffset, 4);
  return result;
}

struct QuantizeExample {
  float value;
  chiasma_scale_mode mode;
  QuantizedTile expected;
};
constexpr QuantizeExample kQuantizeExamples[] = {
    {336.0f, CHIASMA_SCALE_AMAX, {0.75f, 0x7e, 336.0f}},     {336.0f, CHIASMA_SCALE_POW2, {1.0f, 0x7a, 320.0f}},
    {1e-6f, CHIASMA_SCALE_POW2, {0x1p-13f, 0x04, 0x1p-20f}}, {450.0f, CHIASMA_SCALE_POW2, {2.0f, 0x76, 448.0f}},
    {0.0f, CHIASMA_SCALE_POW2, {0x1p-13f, 0x00, 0.0f}},
};

TEST(ContractQuantize, Examples) {
  for (const QuantizeExample& example : kQuantizeExamples) {
    const QuantizedTile actual = through_cache(example.value, example.mode);
    EXPECT_EQ(actual.scale, example.expected.scale) << example.value;
    EXPECT_EQ(actual.byte, example.expected.byte) << example.value;
    EXPECT_EQ(actual.back, example.expected.back) << example.value;
  }
}

// bf16 has no 449, so this one goes to the arithmetic itself.
TEST(ContractQuantize, AnAmaxOf449DoublesTheScale) {
  const float value = 449.0f;
  std::uint8_t code = 0;
  EXPECT_EQ(quantize_tile(&value, 1, ScaleMode::pow2, &code).scale, 2.0f);
  EXPECT_EQ(code, 0x76);
  EXPECT_EQ(e4m3_to_float(code) * 2.0f, 448.0f);
}

// ---- merge ----

TEST(ContractMerge, PartsOfTwoAndEightWithZeroAndTen) {
  std::vector<float> part_out(2 * kValueDim, 0.0f), out(kValueDim), lse(1);
  std::fill_n(part_out.begin() + kValueDim, kValueDim, 10.0f);
  const std::vector<float> part_lse = {std::log(2.0f), std::log(8.0f)};
  chiasma_merge_args args{};
  args.part_out = tensor(part_out.data(), CHIASMA_FLOAT32, kCpu, {2, 1, 1, 1, kValueDim});
  args.part_lse = tensor(part_lse.data(), CHIASMA_FLOAT32, kCpu, {2, 1, 1, 1});
  args.out = tensor(out.data(), CHIASMA_FLOAT32, kCpu, {1, 1, 1, kValueDim});
  args.lse = tensor(lse.data(), CHIASMA_FLOAT32, kCpu, {1, 1, 1});
  merge(args);
  for (const float value : out) EXPECT_NEAR(value, 8.0f, 2e-6f);
  EXPECT_NEAR(lse[0], std::log(10.0f), 3e-7f);
}

}  // namespace
}  // namespace chiasma::test
