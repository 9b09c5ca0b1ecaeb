#include "cuda/split_plan.h"

#include <algorithm>

#include "cuda/combine/combine.h"
#include "cuda/runtime.h"

namespace chiasma {
namespace {

constexpr std::int64_t kVectorBytes = 16;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// What 16-byte accesses need of a tensor that a kernel reads or writes in vectors.
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

// Whole rows also where sharing them out evenly would save at most one part in this many: nothing to merge then.
constexpr std::int64_t kWholeRowLoss = 16;

bool whole_rows_are_even(std::int64_t rows, std::int64_t groups) {
  const std::int64_t rounds = ceil_div(rows, groups);
  return (rounds * groups - rows) * kWholeRowLoss <= rows;
}

}  // namespace

Status check_split_request(const PlanRequest& request) {
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
      request.num_splits > 0 ? request.num_splits : std::max<std::int64_t>(1, ceil_div(topk, kScheduledTokens));
  if (request.problem.num_rows() > INT32_MAX / units_per_row) {
    return unsupported("it counts up to ", INT32_MAX, " parts of rows, this problem has ", request.problem.num_rows(),
                       " rows of ", units_per_row);
  }
  return check_strides(request.problem, nullptr, nullptr);
}

tile::Schedule make_schedule(const PlanRequest& request, const GroupShape& shape) {
  const DecodeProblem& problem = request.problem;
  tile::Schedule schedule{};
  schedule.num_rows = static_cast<std::int32_t>(problem.num_rows());
  schedule.blocks_per_row =
      static_cast<std::int32_t>(std::max<std::int64_t>(1, ceil_div(problem.selection.topk, kScheduledTokens)));
  schedule.blocks_per_unit = 1;
  const int groups = std::max(1, request.device.compute_units / shape.blocks_per_group);
  // Whole rows where the batch must not matter; a given number of parts where the caller asks for one.
  schedule.fixed_units = request.num_splits > 0 || request.batch_invariant;
  if (schedule.fixed_units) {
    schedule.blocks_per_unit =
        static_cast<std::int32_t>(ceil_div(schedule.blocks_per_row, std::max(1, request.num_splits)));
  } else if (whole_rows_are_even(problem.num_rows(), groups)) {
    schedule.blocks_per_unit = schedule.blocks_per_row;
  }
  schedule.units_per_row = static_cast<std::int32_t>(ceil_div(schedule.blocks_per_row, schedule.blocks_per_unit));
  schedule.num_groups = static_cast<std::int32_t>(std::clamp<std::int32_t>(schedule.num_units(), 1, groups));
  return schedule;
}

SplitPlan::SplitPlan(const PlanRequest& request, const GroupShape& shape)
    : schedule_(make_schedule(request, shape)),
      shape_(shape),
      device_(request.device.device.index),
      h_q_(request.problem.h_q),
      is_empty_(request.problem.num_rows() == 0) {}

std::string SplitPlan::describe() const {
  const char* cut = schedule_.units_per_row == 1 ? "; rows stay whole, which costs less here than merging parts"
                    : schedule_.fixed_units      ? "; every row in the same parts"
                                                 : "; cut where the groups' equal shares end";
  return concat("groups: ", schedule_.num_groups, " of ", shape_.blocks_per_group, " thread blocks",
                shape_.is_cluster ? " (a cluster)" : "", " for ", shape_.heads_per_block, " heads each, ",
                schedule_.num_units(), " units of ", schedule_.blocks_per_unit * kScheduledTokens, " entries", cut);
}

Status SplitPlan::run(const DecodeProblem& problem, void* workspace, void* stream) const {
  if (is_empty_) return {};
  CHIASMA_RETURN_IF_ERROR(check_strides(problem, problem.q, problem.out));
  const gpu::DeviceScope scope(device_);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  SplitParams params{problem, schedule_, nullptr, nullptr};
  if (schedule_.num_slots() > 0) {
    params.part_out = static_cast<float*>(workspace);
    params.part_lse = reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + out_bytes());
  }
  CHIASMA_RETURN_IF_ERROR(launch(params, stream));
  return gpu::to_status(
      combine::launch({problem, schedule_, params.part_out, params.part_lse}, static_cast<cudaStream_t>(stream)),
      "launching the combine kernel");
}

std::size_t SplitPlan::out_bytes() const {
  const std::size_t bytes =
      static_cast<std::size_t>(schedule_.num_slots()) * static_cast<std::size_t>(h_q_) * kValueDim * sizeof(float);
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

std::size_t SplitPlan::lse_bytes() const {
  return static_cast<std::size_t>(schedule_.num_slots()) * static_cast<std::size_t>(h_q_) * sizeof(float);
}

}  // namespace chiasma
