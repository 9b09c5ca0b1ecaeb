#include "cuda/sm90_sparse_fp8_seesaw/launch.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "cuda/runtime.h"
#include "cuda/sm90_sparse_fp8_seesaw/kernel.cuh"

namespace chiasma::sm90_sparse_fp8_seesaw {
namespace {

// Columns of the matrix products: the least that holds all heads, at most kMaxHeadsPerCta.
int heads_per_cta(int h_q) {
  int heads = kMinHeadsPerCta;
  while (heads < h_q && heads < kMaxHeadsPerCta) heads *= 2;
  return heads;
}

GroupShape shape_of(int h_q) {
  const int heads = heads_per_cta(h_q);
  return {(h_q + heads - 1) / heads, heads, false};
}

// The dynamic shared memory limit is raised once a device; doing it twice is harmless.
template <typename Config>
Status prepare(std::int32_t device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<bool> done[kMaxDevices];
  if (device < kMaxDevices && done[device].load(std::memory_order_acquire)) return {};
  CHIASMA_RETURN_IF_ERROR(
      gpu::to_status(cudaFuncSetAttribute(decode_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          sizeof(SmemPlan<Config>)),
                     "cudaFuncSetAttribute"));
  if (device < kMaxDevices) done[device].store(true, std::memory_order_release);
  return {};
}

class Plan final : public SplitPlan {
 public:
  explicit Plan(const PlanRequest& request) : SplitPlan(request, shape_of(request.problem.h_q)) {}

 private:
  Status launch(const SplitParams& params, void* stream) const override {
    switch (heads_per_cta(h_q())) {
      case 8: return launch_with<Config<8>>(params, stream);
      case 16: return launch_with<Config<16>>(params, stream);
      case 32: return launch_with<Config<32>>(params, stream);
      default: return launch_with<Config<kMaxHeadsPerCta>>(params, stream);
    }
  }

  template <typename Config>
  Status launch_with(const SplitParams& params, void* stream) const {
    CHIASMA_RETURN_IF_ERROR(prepare<Config>(device()));
    decode_kernel<Config>
        <<<num_thread_blocks(), kThreads, sizeof(SmemPlan<Config>), static_cast<cudaStream_t>(stream)>>>(params);
    return gpu::to_status(cudaGetLastError(), "launching the decode kernel");
  }
};

}  // namespace

std::unique_ptr<PlannedDecode> plan(const PlanRequest& request) {
  return std::make_unique<Plan>(request);
}

}  // namespace chiasma::sm90_sparse_fp8_seesaw
