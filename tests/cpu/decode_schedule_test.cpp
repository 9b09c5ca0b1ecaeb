// How the CPU decode cuts its work, and the promise on scratch memory.
#include <gtest/gtest.h>

#include "api/status.h"
#include "cpu/decode.h"
#include "cpu/decode_kernels.h"

namespace chiasma::test {
namespace {

constexpr std::size_t kMaxWorkspace = 64u << 20;

DecodeProblem make_problem(KvFormat format, std::int64_t b, std::int64_t s_q, int heads, std::int64_t topk) {
  DecodeProblem problem = {};
  problem.format = format;
  problem.b = b;
  problem.s_q = s_q;
  problem.h_q = heads;
  problem.selection.topk = topk;
  return problem;
}

TEST(CpuSchedule, ScratchMemoryStaysBelow64MbForEveryShape) {
  for (const KvFormat format : {KvFormat::v32, KvFormat::v4, KvFormat::bf16}) {
    for (const std::int64_t b : {0, 1, 2, 7, 4096, 1 << 20}) {
      for (const int heads : {1, 16, 128}) {
        for (const std::int64_t topk : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2048}, std::int64_t{1} << 40}) {
          for (const int splits : {0, 1, 64, 1 << 30}) {
            for (const int threads : {1, 2, 3, 64, 1 << 20}) {
              const DecodeProblem problem = make_problem(format, b, 3, heads, topk);
              const cpu::DecodeSchedule schedule = cpu::schedule_decode(problem, splits, threads);
              ASSERT_LT(schedule.workspace_bytes, kMaxWorkspace);
              ASSERT_GE(schedule.num_threads, 1);
              ASSERT_LE(schedule.num_threads, threads);
              ASSERT_GE(schedule.num_splits, 1);
              ASSERT_GE(schedule.tokens_per_split * schedule.num_splits, topk);
              ASSERT_LT(schedule.tokens_per_split * (schedule.num_splits - 1), std::max<std::int64_t>(topk, 1));
            }
          }
        }
      }
    }
  }
}

TEST(CpuSchedule, SplitsDependOnNothingButTheRowsLengthAndTheOption) {
  for (const int splits : {0, 1, 5}) {
    const cpu::DecodeSchedule first = cpu::schedule_decode(make_problem(KvFormat::v32, 1, 1, 128, 2051), splits, 1);
    for (const std::int64_t b : {2, 9, 1000}) {
      for (const int threads : {1, 2, 64}) {
        const cpu::DecodeSchedule other =
            cpu::schedule_decode(make_problem(KvFormat::v32, b, 3, 128, 2051), splits, threads);
        EXPECT_EQ(first.tokens_per_split, other.tokens_per_split);
        EXPECT_EQ(first.num_splits, other.num_splits);
      }
    }
  }
}

TEST(CpuSchedule, TheOptionSetsTheNumberOfSplits) {
  for (int splits = 1; splits <= 40; ++splits) {
    const cpu::DecodeSchedule schedule = cpu::schedule_decode(make_problem(KvFormat::v32, 1, 1, 128, 4000), splits, 4);
    EXPECT_LE(schedule.num_splits, splits);
    EXPECT_GE(schedule.num_splits, splits - 1);
  }
}

}  // namespace
}  // namespace chiasma::test
