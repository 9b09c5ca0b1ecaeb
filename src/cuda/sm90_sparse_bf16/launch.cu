#include "cuda/sm90_sparse_bf16/launch.h"

#include <cuda_runtime.h>

#include "cuda/dependent_launch.h"
#include "cuda/runtime.h"
#include "cuda/shared_limit.h"
#include "cuda/sm90_sparse_bf16/kernel.cuh"
#include "cuda/split_cost.h"

namespace chiasma::sm90_sparse_bf16 {
namespace {

// Fitted to calls back to back on an H200 (driver 580.159.04, 2026-12-01): topk 2048 with 1, 16 and 128 requests.
constexpr HeadCost kCostOf64Heads = {kHeadsPerCta, 8.5, 2.35, 4.0};
constexpr KernelCost kCost = {{{kCostOf64Heads, kCostOf64Heads, kCostOf64Heads, kCostOf64Heads}}, 8.0, 3.8};

template <typename Config>
Status launch_config(const SplitParams& params, std::int32_t device, unsigned num_groups, void* stream) {
  const auto h_q = static_cast<unsigned>(params.problem.h_q);
  const dim3 blocks(num_groups * ((h_q + kHeadsPerCta - 1) / kHeadsPerCta));
  CHIASMA_RETURN_IF_ERROR(gpu::raise_shared_limit<decode_kernel<Config>>(device, sizeof(SmemPlan<Config>)));
  return gpu::to_status(gpu::launch_dependent(decode_kernel<Config>, {blocks, kThreads, sizeof(SmemPlan<Config>)},
                                              params, static_cast<cudaStream_t>(stream)),
                        "launching the decode kernel");
}

class Plan final : public SplitPlan {
 public:
  explicit Plan(const PlanRequest& request) : SplitPlan(request, kCost) {}

 private:
  Status launch(const SplitParams& params, void* stream) const override {
    const auto run = [&]<bool kVectors>() {
      if (params.problem.format == KvFormat::bf16) {
        return launch_config<Config<KvFormat::bf16, kVectors>>(params, device(), num_groups(), stream);
      }
      return launch_config<Config<KvFormat::bf16nope, kVectors>>(params, device(), num_groups(), stream);
    };
    return params.q_is_vectors && params.out_is_vectors ? run.template operator()<true>()
                                                        : run.template operator()<false>();
  }
};

}  // namespace

Status check(const PlanRequest& request) {
  constexpr KvFormat kFormats[] = {KvFormat::bf16, KvFormat::bf16nope};
  return check_split_request(request, kFormats);
}

std::unique_ptr<PlannedDecode> plan(const PlanRequest& request) {
  return std::make_unique<Plan>(request);
}

double estimate_us(const PlanRequest& request) {
  return choose_cut(request, kCost).us;
}

}  // namespace chiasma::sm90_sparse_bf16
