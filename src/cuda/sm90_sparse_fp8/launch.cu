#include "cuda/sm90_sparse_fp8/launch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cuda/combine/combine.h"
#include "cuda/runtime.h"
#include "cuda/sm90_sparse_fp8/kernel.cuh"

namespace chiasma::sm90_sparse_fp8 {
namespace {

constexpr std::int64_t kVectorBytes = 16;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

template <typename Variant>
int blocks_per_group(int h_q) {
  return Variant::kClusterSize > 1 ? Variant::kClusterSize : static_cast<int>(ceil_div(h_q, kHeadsPerCta));
}

template <typename Variant>
tile::Schedule make_schedule(const PlanRequest& request) {
  const DecodeProblem& problem = request.problem;
  tile::Schedule schedule{};
  schedule.num_rows = static_cast<std::int32_t>(problem.num_rows());
  schedule.blocks_per_row =
      static_cast<std::int32_t>(std::max<std::int64_t>(1, ceil_div(problem.selection.topk, kBlockTokens)));
  schedule.blocks_per_unit = 1;
  const int groups = request.device.compute_units / blocks_per_group<Variant>(problem.h_q);
  // Whole rows where the batch must not matter; a given number of parts where the caller asks for one.
  schedule.fixed_units = request.num_splits > 0 || request.batch_invariant;
  if (schedule.fixed_units) {
    schedule.blocks_per_unit =
        static_cast<std::int32_t>(ceil_div(schedule.blocks_per_row, std::max(1, request.num_splits)));
  }
  schedule.units_per_row = static_cast<std::int32_t>(ceil_div(schedule.blocks_per_row, schedule.blocks_per_unit));
  schedule.num_groups = static_cast<std::int32_t>(std::clamp<std::int32_t>(schedule.num_units(), 1, groups));
  return schedule;
}

// What 16-byte accesses need of a tensor that this kernel reads or writes in vectors.
Status check_vectors(const char* name, const void* data, std::initializer_list<std::int64_t> strides) {
  if (reinterpret_cast<std::uintptr_t>(data) % kVectorBytes != 0) {
    return invalid_argument(name, " starts at address ", data, "; this kernel needs a multiple of ", kVectorBytes,
                            " bytes");
  }
  for (const std::int64_t stride : strides) {
    if (stride * static_cast<std::int64_t>(sizeof(bf16_t)) % kVectorBytes != 0) {
      return invalid_argument(name, " has a stride of ", stride, " elements; this kernel needs multiples of ",
                              kVectorBytes / sizeof(bf16_t));
    }
  }
  return {};
}

Status check_strides(const DecodeProblem& problem, const void* q, const void* out) {
  CHIASMA_RETURN_IF_ERROR(check_vectors("q", q, {problem.q_stride_b, problem.q_stride_s, problem.q_stride_h}));
  return check_vectors("out", out, {problem.out_stride_b, problem.out_stride_s, problem.out_stride_h});
}

// The dynamic shared memory limit is raised once a device; doing it twice is harmless.
template <typename Variant>
Status prepare(std::int32_t device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<bool> done[kMaxDevices];
  if (device < kMaxDevices && done[device].load(std::memory_order_acquire)) return {};
  CHIASMA_RETURN_IF_ERROR(gpu::to_status(
      cudaFuncSetAttribute(decode_kernel<Variant>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SmemPlan)),
      "cudaFuncSetAttribute"));
  if (device < kMaxDevices) done[device].store(true, std::memory_order_release);
  return {};
}

template <typename Variant>
class Plan final : public PlannedDecode {
 public:
  explicit Plan(const PlanRequest& request)
      : schedule_(make_schedule<Variant>(request)),
        device_(request.device.device.index),
        h_q_(request.problem.h_q),
        is_empty_(request.problem.num_rows() == 0) {}

  std::size_t workspace_bytes() const override { return out_bytes() + lse_bytes(); }

  std::string describe() const override {
    const char* cut = schedule_.units_per_row == 1 ? "; rows stay whole"
                      : schedule_.fixed_units      ? "; every row in the same parts"
                                                   : "; cut where the groups' equal shares end";
    return concat("groups: ", schedule_.num_groups, " of ", blocks_per_group<Variant>(h_q_), " thread blocks",
                  Variant::kClusterSize > 1 ? " (a cluster)" : "", ", ", schedule_.num_units(), " units of ",
                  schedule_.blocks_per_unit * kBlockTokens, " entries", cut);
  }

  Status run(const DecodeProblem& problem, void* workspace, void* stream) const override {
    if (is_empty_) return {};
    CHIASMA_RETURN_IF_ERROR(check_strides(problem, problem.q, problem.out));
    const gpu::DeviceScope scope(device_);
    CHIASMA_RETURN_IF_ERROR(scope.status());
    CHIASMA_RETURN_IF_ERROR(prepare<Variant>(device_));
    auto* part_out = static_cast<float*>(workspace);
    auto* part_lse = reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + out_bytes());
    if (schedule_.num_slots() == 0) part_out = part_lse = nullptr;
    CHIASMA_RETURN_IF_ERROR(gpu::to_status(
        launch({problem, schedule_, SlotMap::make(problem.kv), part_out, part_lse}, static_cast<cudaStream_t>(stream)),
        "launching the decode kernel"));
    return gpu::to_status(combine::launch({problem, schedule_, part_out, part_lse}, static_cast<cudaStream_t>(stream)),
                          "launching the combine kernel");
  }

 private:
  std::size_t out_bytes() const {
    const std::size_t bytes = static_cast<std::size_t>(schedule_.num_slots()) * h_q_ * kValueDim * sizeof(float);
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  }
  std::size_t lse_bytes() const { return static_cast<std::size_t>(schedule_.num_slots()) * h_q_ * sizeof(float); }

  static cudaError_t launch(const Params& params, cudaStream_t stream) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(Variant::kClusterSize), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim =
        dim3(static_cast<unsigned>(params.schedule.num_groups * blocks_per_group<Variant>(params.problem.h_q)));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(SmemPlan);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, decode_kernel<Variant>, params);
  }

  tile::Schedule schedule_;
  std::int32_t device_;
  int h_q_;
  bool is_empty_;
};

}  // namespace

Status check(const PlanRequest& request) {
  constexpr int kHopper = 90;
  if (request.device.cuda_capability != kHopper) {
    return unsupported("it needs compute capability 9.0, the device has ", request.device.cuda_capability / 10, ".",
                       request.device.cuda_capability % 10);
  }
  if (request.problem.format != KvFormat::v32) {
    return unsupported("it reads v32 caches, this one is ", format_name(request.problem.format));
  }
  // The device counts entries, rows and units in 32 bits.
  constexpr std::int64_t kMaxTopk = std::int64_t{1} << 30;
  const std::int64_t topk = request.problem.selection.topk;
  if (topk > kMaxTopk) return unsupported("it counts up to ", kMaxTopk, " entries in a row, topk is ", topk);
  const std::int64_t units_per_row =
      request.num_splits > 0 ? request.num_splits : std::max<std::int64_t>(1, ceil_div(topk, kBlockTokens));
  if (request.problem.num_rows() > INT32_MAX / units_per_row) {
    return unsupported("it counts up to ", INT32_MAX, " parts of rows, this problem has ", request.problem.num_rows(),
                       " rows of ", units_per_row);
  }
  return check_strides(request.problem, nullptr, nullptr);
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
