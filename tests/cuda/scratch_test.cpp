// Scratch memory of every CUDA kernel over a grid of shapes, from plans alone: no device is needed.
#include <gtest/gtest.h>

#include <string_view>

#include "tests/cuda/hopper_plan.h"

namespace chiasma {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{256} << 20;

// Automatic splits of any shape stay below the bound, batch invariant or not.
void expect_bounded(const char* kernel, const Shape& shape, int* num_plans) {
  const chiasma_device_info device = hopper();
  chiasma_decode_args args = args_of(shape);
  if (std::string_view(kernel) == "sm90_sparse_bf16") {
    args.format = CHIASMA_KV_BF16;
    args.kv_cache.dtype = CHIASMA_BFLOAT16;
    args.kv_cache.shape[2] = chiasma_kv_width(args.format);
    args.kv_cache.stride[1] = args.kv_cache.shape[2];
    args.kv_cache.stride[0] = args.kv_cache.shape[1] * args.kv_cache.stride[1];
  }
  for (const int invariant : {0, 1}) {
    chiasma_plan_options options = {};
    options.kernel = kernel;
    options.batch_invariant = invariant;
    options.device_info = &device;
    chiasma_decode_plan* plan = nullptr;
    if (chiasma_decode_plan_create(&args, &options, &plan) != CHIASMA_OK) continue;
    ++*num_plans;
    EXPECT_LT(chiasma_decode_plan_workspace_bytes(plan), kMaxBytes) << chiasma_decode_plan_text(plan);
    chiasma_decode_plan_destroy(plan);
  }
}

TEST(CudaScratch, StaysBelow256MegabytesWhateverTheShape) {
  int num_kernels = 0;
  for (int number = 0; number < chiasma_kernel_count(); ++number) {
    chiasma_kernel_info info;
    ASSERT_EQ(chiasma_kernel_query(number, &info), CHIASMA_OK);
    if (info.device_kind != CHIASMA_CUDA) continue;
    ++num_kernels;
    int num_plans = 0;
    for (const std::int64_t b : {1, 2, 31, 66, 132, 133, 1000, 65536}) {
      for (const std::int64_t s_q : {1, 4, 65536}) {
        for (const std::int64_t h_q : {1, 8, 16, 32, 64, 128}) {
          for (const std::int64_t topk : {0, 64, 2048, 2049, 131072}) {
            expect_bounded(info.name, {b, s_q, h_q, topk}, &num_plans);
          }
        }
      }
    }
    EXPECT_GT(num_plans, 100) << info.name;
  }
  if (num_kernels == 0) GTEST_SKIP() << "NOT RUN: this build has no CUDA kernels";
}

}  // namespace
}  // namespace chiasma
