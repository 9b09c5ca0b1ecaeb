// How Hopper kernels cut work, from plans alone: no device is needed.
#include <gtest/gtest.h>

#include <string>

#include "tests/cuda/hopper_plan.h"

namespace chiasma {
namespace {

// The text of a plan on a GPU of 132 multiprocessors; empty where the build has no such kernel.
std::string plan_text(const Shape& shape, const char* kernel = nullptr, bool batch_invariant = false) {
  const chiasma_device_info info = hopper();
  const chiasma_decode_args args = args_of(shape);
  chiasma_plan_options options = {};
  options.kernel = kernel;
  options.batch_invariant = batch_invariant ? 1 : 0;
  options.device_info = &info;
  chiasma_decode_plan* plan = nullptr;
  if (chiasma_decode_plan_create(&args, &options, &plan) != CHIASMA_OK) return {};
  std::string text = chiasma_decode_plan_text(plan);
  chiasma_decode_plan_destroy(plan);
  return text;
}

class SplitPlan : public testing::Test {
 protected:
  void SetUp() override {
    if (plan_text({1, 1, 128, 64}).empty()) GTEST_SKIP() << "NOT RUN: this build has no CUDA kernels";
  }
};

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
}

TEST_F(SplitPlan, HeadsDecideHowManyThreadBlocksShareARow) {
  expect_in(plan_text({128, 1, 8, 2048}), "of 1 thread blocks for 8 heads each");
  expect_in(plan_text({128, 1, 9, 2048}), "of 1 thread blocks for 16 heads each");
  expect_in(plan_text({128, 1, 32, 2048}), "of 1 thread blocks for 32 heads each");
  expect_in(plan_text({128, 1, 64, 2048}), "of 1 thread blocks for 64 heads each");
  expect_in(plan_text({128, 1, 65, 2048}), "of 2 thread blocks for 64 heads each");
  expect_in(plan_text({128, 1, 16, 2048}, "sm90_sparse_fp8_crossover"),
            "of 2 thread blocks (a cluster) for 64 heads each");
}

// 66 groups of two: 64 rows and 256 rows leave at most one part in 16 idle, 67 and 296 do not.
TEST_F(SplitPlan, RowsStayWholeWhereTheyAreEvenAmongTheGroups) {
  for (const char* kernel : {"sm90_sparse_fp8_direct", "sm90_sparse_fp8_crossover"}) {
    expect_in(plan_text({64, 1, 128, 2048}, kernel), "rows stay whole");
    expect_in(plan_text({128, 2, 128, 2048}, kernel), "rows stay whole");
    expect_in(plan_text({148, 2, 128, 16384}, kernel), "cut where the groups' equal shares end");
  }
  expect_in(plan_text({67, 1, 128, 2048}, "sm90_sparse_fp8_crossover"), "cut where the groups' equal shares end");
}

TEST_F(SplitPlan, SmallBatchesGetFewHeadsAThreadBlockAndSayWhy) {
  const std::string text = plan_text({1, 1, 128, 2048}, "sm90_sparse_fp8_direct");
  expect_in(text, "for 16 heads each");
  expect_in(text, "every row in 16 equal parts");
  expect_in(text, "estimated us at best: 8 heads ");
}

TEST_F(SplitPlan, BatchInvariantHeadsAreNeverChosenByTheBatch) {
  for (const std::int64_t b : {1, 31, 67, 263}) {
    expect_in(plan_text({b, 1, 128, 2048}, "sm90_sparse_fp8_direct", true), "for 64 heads each");
    expect_in(plan_text({b, 1, 16, 2048}, "sm90_sparse_fp8_direct", true), "for 16 heads each");
  }
}

TEST_F(SplitPlan, BatchInvariantRowsAreNeverCutByTheBatch) {
  for (const std::int64_t b : {1, 31, 67, 263})
    expect_in(plan_text({b, 1, 128, 2048}, nullptr, true), "rows stay whole");
}

TEST_F(SplitPlan, AnEmptyBatchNeedsNothing) {
  expect_in(plan_text({0, 1, 128, 2048}), "workspace: 0 bytes");
}

}  // namespace
}  // namespace chiasma
