// The CPU decode against the oracle, and against itself: thread counts, splits, batches, instruction sets.
#include "cpu/decode.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>

#include "cpu/kv_rows.h"
#include "hwy/targets.h"
#include "tests/cpu/decode_run.h"
#include "tests/cpu/random_problem.h"

namespace chiasma::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr auto& kFormats = kAllFormats;

// Everything at once: odd pages and strides, masked entries anywhere, lengths, sinks; for v4 a second selection.
ProblemShape full_shape(KvFormat format, int heads, std::int64_t topk) {
  ProblemShape shape;
  shape.format = format;
  shape.h_q = heads;
  shape.topk = topk;
  shape.pages = 41;
  shape.page_size = 7;
  shape.page_gap = 48;
  shape.lengths = shape.sinks = true;
  shape.sm_scale = 0.02f;
  if (traits_of(format).has_second_cache) {
    shape.extra_pages = 13;
    shape.extra_page_size = 3;
    shape.extra_topk = topk / 2 + 1;
  }
  return shape;
}

TEST(CpuDecode, MatchesOracleForEveryFormatAndHeadCount) {
  for (const KvFormat format : kFormats) {
    for (const int heads : {1, 3, 5, 8, 9, 16, 17, 96, 127, 128}) {
      const RandomProblem random(full_shape(format, heads, 200), static_cast<std::uint64_t>(heads));
      SCOPED_TRACE(concat(format_name(format), " heads ", heads));
      expect_matches_oracle(random.problem);
    }
  }
}

TEST(CpuDecode, MatchesOracleForQueriesInTwoTensorsAndLengthsOfEachQueryToken) {
  for (const KvFormat format : kFormats) {
    for (const int heads : {1, 9, 65, 128}) {
      ProblemShape shape = full_shape(format, heads, 150);
      shape.s_q = 3;
      shape.q_pair = shape.length_each_row = true;
      const RandomProblem random(shape, static_cast<std::uint64_t>(heads));
      SCOPED_TRACE(concat(format_name(format), " heads ", heads));
      expect_matches_oracle(random.problem);
    }
  }
}

TEST(CpuDecode, MatchesOracleForEveryTopkAroundABlock) {
  for (const KvFormat format : kFormats) {
    for (const std::int64_t topk : {1, 2, 5, 7, 11, 13, 63, 65, 127, 128, 129, 191, 256, 511, 513, 1025, 2051}) {
      ProblemShape shape = full_shape(format, 6, topk);
      shape.lengths = false;
      shape.valid = topk < 600 ? 1.0f : 0.5f;
      const RandomProblem random(shape, static_cast<std::uint64_t>(topk));
      SCOPED_TRACE(concat(format_name(format), " topk ", topk));
      expect_matches_oracle(random.problem);
    }
  }
}

TEST(CpuDecode, EverySplitCountMatchesOracleAndThreadsNeverChangeABit) {
  for (const KvFormat format : kFormats) {
    for (const std::int64_t b : {1, 3}) {
      ProblemShape shape = full_shape(format, 20, 300);
      shape.b = b;
      const RandomProblem random(shape, 7);
      const OracleResult reference = oracle(random.problem);
      for (int splits = 1; splits <= 40; ++splits) {
        SCOPED_TRACE(concat(format_name(format), " b ", b, " splits ", splits));
        const DecodeResult result = decode(random.problem, splits, 1);
        expect_near(result, reference);
        for (const int threads : {2, 3, 5, 7}) {
          EXPECT_TRUE(same_bits(result, decode(random.problem, splits, threads))) << threads << " threads";
        }
      }
    }
  }
}

TEST(CpuDecode, MoreSplitsThanFitScratchMemoryAreMergedInSeveralWaves) {
  ProblemShape shape = full_shape(KvFormat::v32, 128, 300);
  shape.b = 1;
  shape.s_q = 3;
  shape.lengths = false;
  const RandomProblem random(shape, 8);
  const cpu::DecodeSchedule schedule = cpu::schedule_decode(random.problem, 300, 2);
  ASSERT_LT(schedule.splits_per_wave, schedule.num_splits);
  const DecodeResult result = decode(random.problem, 300, 2);
  expect_near(result, oracle(random.problem));
  EXPECT_TRUE(same_bits(result, decode(random.problem, 300, 1)));
}

TEST(CpuDecode, ResultsDoNotDependOnTheBatch) {
  ProblemShape shape = full_shape(KvFormat::v32, 33, 1100);
  shape.b = 5;
  const RandomProblem random(shape, 9);
  const DecodeResult batch = decode(random.problem);
  const std::int64_t heads = shape.s_q * shape.h_q;
  for (std::int64_t i = 0; i < shape.b; ++i) {
    DecodeProblem alone = random.problem;
    alone.b = 1;
    alone.q += i * alone.q_stride_b;
    alone.selection.indices += i * alone.selection.stride_b;
    alone.q_rope += i * alone.q_rope_stride_b;
    alone.selection.length += i * alone.selection.length_stride_b;
    const DecodeResult result = decode(alone);
    const DecodeResult part{
        {batch.out.begin() + i * heads * kValueDim, batch.out.begin() + (i + 1) * heads * kValueDim},
        {batch.lse.begin() + i * heads, batch.lse.begin() + (i + 1) * heads}};
    EXPECT_TRUE(same_bits(result, part)) << "request " << i;
  }
}

TEST(CpuDecode, EveryInstructionSetMatchesOracle) {
  std::set<std::string> names;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    names.insert(cpu::simd_target());
    for (const KvFormat format : kFormats) {
      for (const int heads : {1, 7, 40, 128}) {
        SCOPED_TRACE(concat(cpu::simd_target(), " ", format_name(format), " heads ", heads));
        const RandomProblem random(full_shape(format, heads, 300), 10);
        const DecodeResult result = decode(random.problem, 2, 1);
        expect_near(result, oracle(random.problem));
        EXPECT_TRUE(same_bits(result, decode(random.problem, 2, 3)));
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  EXPECT_EQ(names.size(), hwy::SupportedAndGeneratedTargets().size()) << "the targets were not switched";
}

TEST(CpuDecode, UnselectedSlotsNeverMatter) {
  for (const KvFormat format : kFormats) {
    ProblemShape shape = full_shape(format, 16, 60);
    RandomProblem random(shape, 11);
    const DecodeResult before = decode(random.problem);
    std::set<std::int64_t> selected;
    const Selection& selection = random.problem.selection;
    for (std::int64_t row = 0; row < random.problem.num_rows(); ++row) {
      const std::int64_t i = row / shape.s_q;
      const std::int64_t length = std::min<std::int64_t>(selection.length[i * selection.length_stride_b], shape.topk);
      const std::int32_t* entries = selection.indices + i * selection.stride_b + row % shape.s_q * selection.stride_s;
      for (std::int64_t entry = 0; entry < length; ++entry) selected.insert(entries[entry]);
    }
    std::int64_t poisoned = 0;
    for (std::int64_t slot = 0; slot < random.problem.kv.num_slots(); ++slot) {
      if (selected.count(slot) != 0) continue;
      const cpu::RowBytes bytes = cpu::locate_row(format, random.problem.kv, slot);
      std::memset(const_cast<std::byte*>(bytes.row), 0xff, static_cast<std::size_t>(row_stride_bytes(format)));
      if (traits_of(format).has_scale_plane()) {
        std::memset(const_cast<std::byte*>(bytes.scales), 0xff,
                    static_cast<std::size_t>(traits_of(format).plane_group_bytes));
      }
      ++poisoned;
    }
    ASSERT_GT(poisoned, 0);
    EXPECT_TRUE(same_bits(before, decode(random.problem))) << format_name(format);
  }
}

TEST(CpuDecode, EntriesBehindTheLengthAreNotRead) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  auto* memory =
      static_cast<std::byte*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(memory), MAP_FAILED);
  ASSERT_EQ(mprotect(memory + page, page, PROT_NONE), 0);
  for (const std::int32_t length : {0, 1, 127, 128, 200, -5}) {
    ProblemShape shape = full_shape(KvFormat::v32, 4, 700);
    shape.b = shape.s_q = 1;
    const RandomProblem random(shape, 12);
    const std::size_t readable = static_cast<std::size_t>(std::max(length, 0));
    auto* indices = reinterpret_cast<std::int32_t*>(memory + page) - readable;
    std::copy_n(random.problem.selection.indices, readable, indices);
    DecodeProblem problem = random.problem;
    problem.selection.indices = indices;
    problem.selection.length = &length;
    expect_matches_oracle(problem);
  }
  munmap(memory, 2 * page);
}

TEST(CpuDecode, NothingSelectedGivesZeroAndMinusInfinity) {
  for (const int variant : {0, 1, 2}) {
    ProblemShape shape = full_shape(KvFormat::v4, 5, variant == 0 ? 0 : 600);
    if (variant == 0) shape.extra_topk = 0;
    shape.valid = 0.0f;
    if (variant == 2) shape.pages = shape.extra_pages = 0;
    const RandomProblem random(shape, 13);
    const DecodeResult result = decode(random.problem);
    EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), [](bf16_t x) { return x == bf16_t{0}; }));
    EXPECT_TRUE(std::all_of(result.lse.begin(), result.lse.end(), [](float x) { return x == -kInfinity; }));
  }
}

TEST(CpuDecode, NoRowsIsValid) {
  ProblemShape shape = full_shape(KvFormat::v32, 5, 9);
  const RandomProblem random(shape, 14);
  DecodeProblem problem = random.problem;
  problem.b = 0;
  EXPECT_TRUE(decode(problem, 0, 7).lse.empty());
  problem.b = 2;
  problem.s_q = 0;
  EXPECT_TRUE(decode(problem, 3, 7).lse.empty());
}

TEST(CpuDecode, AnyFiniteScoreScale) {
  for (const float sm_scale : {0.0f, -0.0f, -0.02f, 1e-30f, 10.0f, -1e4f}) {
    ProblemShape shape = full_shape(KvFormat::v32, 12, 300);
    shape.sm_scale = sm_scale;
    const RandomProblem random(shape, 15);
    const OracleResult reference = oracle(random.problem);
    const DecodeResult result = decode(random.problem);
    if (std::abs(sm_scale) < 1.0f) {
      expect_near(result, reference);
      continue;
    }
    // A score of thousands keeps too few fraction bits in float32 for the bound on out; lse is relative.
    for (std::size_t i = 0; i < result.lse.size(); ++i) {
      if (std::isfinite(reference.lse[i])) {
        EXPECT_NEAR(result.lse[i], reference.lse[i], 2e-5 * std::abs(reference.lse[i]));
      }
    }
  }
}

}  // namespace
}  // namespace chiasma::test
