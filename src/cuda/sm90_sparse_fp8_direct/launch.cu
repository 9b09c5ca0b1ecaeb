#include "cuda/sm90_sparse_fp8_direct/launch.h"

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dependent_launch.h"
#include "cuda/runtime.h"
#include "cuda/shared_limit.h"
#include "cuda/sm90_sparse_fp8_direct/kernel.cuh"
#include "cuda/split_cost.h"

namespace chiasma::sm90_sparse_fp8_direct {
namespace {

// Measured on an H200 (driver 580.159.04, 2026-11-30): graphs of calls with 128 heads and whole rows of 1 to 32 blocks,
// all multiprocessors busy. Parts: rows in 2 to 32 parts against the same without.
constexpr KernelCost kCost = {
    {{{8, 5.9, 1.24, 2.0}, {16, 6.2, 1.28, 3.0}, {32, 7.0, 1.55, 4.5}, {64, 9.7, 2.25, 9.8}}},
    8.0,
};
static_assert(kCost.heads.front().heads == kMinHeadsPerCta && kCost.heads.back().heads == kMaxHeadsPerCta);

class Plan final : public SplitPlan {
 public:
  explicit Plan(const PlanRequest& request) : SplitPlan(request, kCost) {}

 private:
  Status launch(const SplitParams& params, void* stream) const override {
    switch (heads_per_block()) {
      case 8: return launch_with<Config<8>>(params, stream);
      case 16: return launch_with<Config<16>>(params, stream);
      case 32: return launch_with<Config<32>>(params, stream);
      default: return launch_with<Config<kMaxHeadsPerCta>>(params, stream);
    }
  }

  template <typename Config>
  Status launch_with(const SplitParams& params, void* stream) const {
    CHIASMA_RETURN_IF_ERROR(gpu::raise_shared_limit<decode_kernel<Config>>(device(), sizeof(SmemPlan<Config>)));
    return gpu::to_status(
        gpu::launch_dependent(decode_kernel<Config>, {dim3(num_thread_blocks()), kThreads, sizeof(SmemPlan<Config>)},
                              params, static_cast<cudaStream_t>(stream)),
        "launching the decode kernel");
  }
};

}  // namespace

std::unique_ptr<PlannedDecode> plan(const PlanRequest& request) {
  return std::make_unique<Plan>(request);
}

double estimate_us(const PlanRequest& request) {
  return choose_cut(request, kCost).us;
}

}  // namespace chiasma::sm90_sparse_fp8_direct
