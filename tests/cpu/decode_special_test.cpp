// Special numbers in the CPU decode: NaN and infinity from every input, extreme scales, and the exactness of its
// dequantisation, on every instruction set of the machine.
#include <gtest/gtest.h>

#include <functional>

#include "cpu/decode_kernels.h"
#include "hwy/targets.h"
#include "tests/cpu/decode_run.h"
#include "tests/cpu/random_problem.h"

namespace chiasma::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void on_every_instruction_set(const std::function<void()>& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(cpu::simd_target());
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

ProblemShape plain_shape() {
  ProblemShape shape;
  shape.b = 1;
  shape.s_q = 2;
  shape.h_q = 11;
  shape.pages = 60;
  shape.page_size = 5;
  shape.topk = 400;
  shape.sm_scale = 0.02f;
  return shape;
}

// First slot that query token 0 selects at or after entry `begin`.
std::int64_t selected_slot(const DecodeProblem& problem, std::int64_t begin) {
  for (std::int64_t entry = begin;; ++entry) {
    const std::int64_t slot = problem.selection.indices[entry];
    if (slot >= 0 && slot < problem.kv.num_slots()) return slot;
  }
}

std::byte* row_of(RandomProblem& random, std::int64_t slot) {
  return const_cast<std::byte*>(cpu::locate_row(random.problem.format, random.problem.kv, slot).row);
}

TEST(CpuDecodeSpecial, NanCodeStaysInItsColumnsAndRows) {
  on_every_instruction_set([] {
    for (const int code : {0x7f, 0xff}) {
      RandomProblem random(plain_shape(), 21);
      row_of(random, selected_slot(random.problem, 130))[300] = std::byte(code);
      for (const int splits : {1, 4}) expect_matches_oracle(random.problem, splits);
    }
  });
}

TEST(CpuDecodeSpecial, NanAndInfiniteScalesFollowTheOracle) {
  on_every_instruction_set([] {
    for (const float scale : {kNan, kInfinity, -kInfinity, -0.5f, 0.0f, 1e-40f, 1e-44f, 1e-30f, 1e30f}) {
      RandomProblem random(plain_shape(), 22);
      SCOPED_TRACE(scale);
      std::memcpy(row_of(random, selected_slot(random.problem, 20)) + v32::kScalesOffset + 4, &scale, 4);
      for (const int splits : {1, 4}) expect_matches_oracle(random.problem, splits);
    }
  });
}

TEST(CpuDecodeSpecial, Ue8m0CodesFollowTheOracle) {
  for (const int code : {0, 1, 254, 255}) {
    ProblemShape shape = plain_shape();
    shape.format = KvFormat::v4;
    RandomProblem random(shape, 23);
    SCOPED_TRACE(code);
    const std::int64_t slot = selected_slot(random.problem, 20);
    // Small numbers, so that products with the largest scale stay finite in float32.
    std::fill_n(row_of(random, slot), traits_of(KvFormat::v4).scale_columns, std::byte{0x01});
    *const_cast<std::byte*>(cpu::locate_row(shape.format, random.problem.kv, slot).scales) = std::byte(code);
    expect_matches_oracle(random.problem);
  }
}

// bf16 rows of one repeated number give scores of any kind; q is 1 in the first place and 0 elsewhere, or negated.
TEST(CpuDecodeSpecial, InfiniteScoresFollowTheOracle) {
  on_every_instruction_set([] {
    const float values[] = {1.0f, kInfinity, -kInfinity, kNan};
    for (int pattern = 0; pattern < 4 * 4 * 4; ++pattern) {
      ProblemShape shape = plain_shape();
      shape.format = KvFormat::bf16;
      shape.h_q = 2;
      shape.topk = 3;
      shape.valid = 1.0f;
      RandomProblem random(shape, 24);
      // Only the RoPE part, which is no value, so that out is finite where the probabilities are.
      for (int entry = 0, rest = pattern; entry < 3; ++entry, rest /= 4) {
        const bf16_t value = to_bf16(values[rest % 4]);
        std::memcpy(row_of(random, random.problem.selection.indices[entry]) + 2 * kValueDim, &value, 2);
      }
      SCOPED_TRACE(pattern);
      for (const int splits : {1, 3}) expect_matches_oracle(random.problem, splits);
    }
  });
}

TEST(CpuDecodeSpecial, InfiniteAndNanQueriesFollowTheOracle) {
  for (const float value : {kNan, kInfinity, -kInfinity}) {
    RandomProblem random(plain_shape(), 25);
    const_cast<bf16_t*>(random.problem.q)[3 * random.problem.q_stride_h + 17] = to_bf16(value);
    for (const int splits : {1, 4}) expect_matches_oracle(random.problem, splits);
  }
}

TEST(CpuDecodeSpecial, SinksOfEveryKind) {
  for (const float sink : {kNan, kInfinity, -kInfinity, 0.0f, 1e30f, -1e30f, 3.0f}) {
    ProblemShape shape = plain_shape();
    shape.sinks = true;
    RandomProblem random(shape, 26);
    std::vector<float> sinks(11, sink);
    random.problem.attn_sink = sinks.data();
    random.problem.attn_sink_stride = 1;
    SCOPED_TRACE(sink);
    expect_matches_oracle(random.problem);
  }
}

// All 256 codes, scales of any significand and size, bit for bit; NaN need only be NaN.
TEST(CpuDecodeSpecial, DequantisationRoundsOnce) {
  on_every_instruction_set([] {
    for (const float scale : {1.0f, 0.3f, 1.00390625f, 1e-3f, 3e-39f, 1e-45f, 7e35f, 2e38f, -0.7f, kInfinity, kNan}) {
      std::vector<std::byte> row(v32::kRowBytes);
      for (const bool with_nan : {false, true}) {
        for (int i = 0; i < v32::kNopeDim; ++i) {
          const bool is_nan = (i & 0x7f) == 0x7f;
          row[static_cast<std::size_t>(i)] = std::byte(is_nan && !with_nan ? 0 : i & 0xff);
        }
        for (int tile = 0; tile < v32::kNumTiles; ++tile) {
          std::memcpy(row.data() + v32::kScalesOffset + 4 * tile, &scale, 4);
        }
        std::vector<float> storage(cpu::kTileStride + 16);
        void* aligned = storage.data();
        std::size_t space = storage.size() * sizeof(float);
        auto* tile = static_cast<float*>(std::align(64, cpu::kTileStride * sizeof(float), aligned, space));
        const cpu::RowBytes bytes{row.data(), row.data() + v32::kScalesOffset};
        cpu::dequantize_kv(KvFormat::v32, &bytes, 1, tile);
        for (int i = 0; i < v32::kNopeDim; ++i) {
          const float expected = e4m3_to_float(cpu::load_byte(row.data(), i)) * scale;
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(tile[i])) << scale << " code " << i;
          } else {
            ASSERT_EQ(std::bit_cast<std::uint32_t>(tile[i]), std::bit_cast<std::uint32_t>(expected))
                << scale << " code " << i;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace chiasma::test
