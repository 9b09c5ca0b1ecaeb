// How Hopper kernels cut work, from plans alone: no device is needed.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "chiasma/chiasma.h"

namespace chiasma {
namespace {

struct Shape {
  std::int64_t b, s_q, h_q, topk;
};

// The text of a plan on a GPU of 132 multiprocessors; empty where the build has no such kernel.
std::string plan_text(const Shape& shape, const char* kernel = nullptr, bool batch_invariant = false) {
  chiasma_device_info info = {};
  info.device = {CHIASMA_CUDA, 0};
  std::strcpy(info.name, "a GPU of compute capability 9.0");
  info.compute_units = 132;
  info.cuda_capability = 90;
  const auto tensor = [&](chiasma_dtype dtype, std::initializer_list<std::int64_t> extents) {
    return chiasma_contiguous(nullptr, dtype, info.device, static_cast<std::int32_t>(extents.size()), extents.begin());
  };
  chiasma_decode_args args = {};
  args.format = CHIASMA_KV_V32;
  args.sm_scale = chiasma_default_sm_scale(CHIASMA_KV_V32);
  args.q = tensor(CHIASMA_BFLOAT16, {shape.b, shape.s_q, shape.h_q, 576});
  args.kv_cache = tensor(CHIASMA_UINT8, {1000, 64, 656});
  args.indices = tensor(CHIASMA_INT32, {shape.b, shape.s_q, shape.topk});
  args.out = tensor(CHIASMA_BFLOAT16, {shape.b, shape.s_q, shape.h_q, 512});
  args.lse = tensor(CHIASMA_FLOAT32, {shape.b, shape.s_q, shape.h_q});
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
  expect_in(plan_text({64, 1, 128, 2048}), "rows stay whole");
  expect_in(plan_text({128, 2, 128, 2048}), "rows stay whole");
  expect_in(plan_text({67, 1, 128, 2048}), "cut where the groups' equal shares end");
  expect_in(plan_text({148, 2, 128, 16384}), "cut where the groups' equal shares end");
  expect_in(plan_text({1, 1, 128, 2048}), "groups: 32 of 2 thread blocks");
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
