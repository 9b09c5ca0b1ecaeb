#include "cuda/sm90_sparse_fp8/launch.h"

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/runtime.h"
#include "cuda/shared_limit.h"
#include "cuda/sm90_sparse_fp8/kernel.cuh"
#include "cuda/split_plan.h"

namespace chiasma::sm90_sparse_fp8 {
namespace {

static_assert(kBlockTokens == kScheduledTokens);

template <typename Variant>
GroupShape shape_of(int h_q) {
  if constexpr (Variant::kClusterSize > 1) return {Variant::kClusterSize, kHeadsPerCta, true};
  return GroupShape::of_neighbours(h_q, kHeadsPerCta);
}

template <typename Variant>
class Plan final : public SplitPlan {
 public:
  explicit Plan(const PlanRequest& request) : SplitPlan(request, shape_of<Variant>(request.problem.h_q)) {}

 private:
  Status launch(const SplitParams& split, void* stream) const override {
    CHIASMA_RETURN_IF_ERROR(check_vector_tensors(split.problem));
    CHIASMA_RETURN_IF_ERROR(gpu::raise_shared_limit<decode_kernel<Variant>>(device(), sizeof(SmemPlan)));
    const Params params{split.problem, split.schedule, SlotMap::make(split.problem.kv), split.part_out, split.part_lse};
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(Variant::kClusterSize), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_thread_blocks());
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(SmemPlan);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return gpu::to_status(cudaLaunchKernelEx(&config, decode_kernel<Variant>, params), "launching the decode kernel");
  }
};

}  // namespace

Status check(const PlanRequest& request) {
  constexpr KvFormat kFormats[] = {KvFormat::v32};
  CHIASMA_RETURN_IF_ERROR(check_split_request(request, kFormats));
  CHIASMA_RETURN_IF_ERROR(check_vector_strides(request.problem));
  // Its registers are full.
  if (request.problem.selection.length_stride_s != 0) {
    return unsupported("it takes one topk_length a request, here every query token has its own");
  }
  if (!request.problem.q_is_one_tensor) return unsupported("it reads queries from one tensor, these have q_rope");
  return {};
}

bool suits_crossover(const PlanRequest& request) {
  return request.problem.h_q > kHeadsPerCta;
}

std::unique_ptr<PlannedDecode> plan_crossover(const PlanRequest& request) {
  return std::make_unique<Plan<Crossover>>(request);
}
std::unique_ptr<PlannedDecode> plan_baseline(const PlanRequest& request) {
  return std::make_unique<Plan<Baseline>>(request);
}

}  // namespace chiasma::sm90_sparse_fp8
