#include "cuda/split_plan.h"

#include <algorithm>

#include "cuda/combine/combine.h"
#include "cuda/runtime.h"
#include "cuda/split_cost.h"

namespace chiasma {
namespace {

constexpr std::int64_t kVectorBytes = 16;

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

// problem's own addresses are not valid while planning.
struct Addresses {
  const void *q, *q_rope, *out;
};

Status check_queries(const DecodeProblem& problem, const Addresses& addresses) {
  CHIASMA_RETURN_IF_ERROR(
      check_vectors("q", addresses.q, {problem.q_stride_b, problem.q_stride_s, problem.q_stride_h}));
  if (problem.q_is_one_tensor) return {};
  return check_vectors("q_rope", addresses.q_rope,
                       {problem.q_rope_stride_b, problem.q_rope_stride_s, problem.q_rope_stride_h});
}

Status check_outputs(const DecodeProblem& problem, const Addresses& addresses) {
  return check_vectors("out", addresses.out, {problem.out_stride_b, problem.out_stride_s, problem.out_stride_h});
}

// Every cache's entries begin a block of their own.
std::int64_t blocks_of_row(const DecodeProblem& problem) {
  const std::int64_t blocks =
      ceil_div(problem.selection.topk, kScheduledTokens) + ceil_div(problem.extra_selection.topk, kScheduledTokens);
  return std::max<std::int64_t>(1, blocks);
}

// Whole rows also where sharing them out evenly would save at most one part in this many: nothing to merge then.
constexpr std::int64_t kWholeRowLoss = 16;

bool whole_rows_are_even(std::int64_t rows, std::int64_t groups) {
  const std::int64_t rounds = ceil_div(rows, groups);
  return (rounds * groups - rows) * kWholeRowLoss <= rows;
}

}  // namespace

Status check_split_request(const PlanRequest& request, std::span<const KvFormat> formats) {
  constexpr int kHopper = 90;
  if (request.device.cuda_capability != kHopper) {
    return unsupported("it needs compute capability 9.0, the device has ", request.device.cuda_capability / 10, ".",
                       request.device.cuda_capability % 10);
  }
  if (std::find(formats.begin(), formats.end(), request.problem.format) == formats.end()) {
    std::string names;
    for (const KvFormat format : formats) names += concat(names.empty() ? "" : ", ", format_name(format));
    return unsupported("it reads caches of format ", names, ", this one is ", format_name(request.problem.format));
  }
  // The device counts entries, rows and units in 32 bits.
  constexpr std::int64_t kMaxTopk = std::int64_t{1} << 30;
  const std::int64_t topk = request.problem.selection.topk + request.problem.extra_selection.topk;
  if (topk > kMaxTopk) return unsupported("it counts up to ", kMaxTopk, " entries in a row, topk is ", topk);
  const std::int64_t units_per_row = request.num_splits > 0 ? request.num_splits : blocks_of_row(request.problem);
  if (request.problem.num_rows() > INT32_MAX / units_per_row) {
    return unsupported("it counts up to ", INT32_MAX, " parts of rows, this problem has ", request.problem.num_rows(),
                       " rows of ", units_per_row);
  }
  return {};
}

Status check_vector_strides(const DecodeProblem& problem) {
  CHIASMA_RETURN_IF_ERROR(check_queries(problem, {}));
  return check_outputs(problem, {});
}

Status check_vector_tensors(const DecodeProblem& problem) {
  const Addresses addresses{problem.q, problem.q_rope, problem.out};
  CHIASMA_RETURN_IF_ERROR(check_queries(problem, addresses));
  return check_outputs(problem, addresses);
}

std::int32_t num_groups_that_fit(const PlanRequest& request, const GroupShape& shape) {
  return std::max(1, request.device.compute_units / shape.blocks_per_group);
}

tile::Schedule make_schedule(const PlanRequest& request, const GroupShape& shape, std::int32_t parts) {
  const DecodeProblem& problem = request.problem;
  tile::Schedule schedule{};
  schedule.num_rows = static_cast<std::int32_t>(problem.num_rows());
  schedule.blocks_per_row = static_cast<std::int32_t>(blocks_of_row(problem));
  schedule.fixed_units = parts != kPartsAnywhere;
  schedule.blocks_per_unit =
      schedule.fixed_units ? static_cast<std::int32_t>(ceil_div(schedule.blocks_per_row, parts)) : 1;
  schedule.units_per_row = static_cast<std::int32_t>(ceil_div(schedule.blocks_per_row, schedule.blocks_per_unit));
  schedule.num_groups =
      static_cast<std::int32_t>(std::clamp<std::int32_t>(schedule.num_units(), 1, num_groups_that_fit(request, shape)));
  return schedule;
}

tile::Schedule make_schedule(const PlanRequest& request, const GroupShape& shape) {
  if (request.num_splits > 0 || request.batch_invariant) {
    // Whole rows where the batch must not matter; a given number of parts where the caller asks for one.
    return make_schedule(request, shape, std::max(1, request.num_splits));
  }
  const bool is_even = whole_rows_are_even(request.problem.num_rows(), num_groups_that_fit(request, shape));
  return make_schedule(request, shape, is_even ? 1 : kPartsAnywhere);
}

SplitPlan::SplitPlan(const PlanRequest& request, const Cut& cut)
    : schedule_(cut.schedule),
      shape_(cut.shape),
      reason_(cut.reason),
      device_(request.device.device.index),
      h_q_(request.problem.h_q),
      is_empty_(request.problem.num_rows() == 0) {}

SplitPlan::SplitPlan(const PlanRequest& request, const GroupShape& shape)
    : SplitPlan(request, Cut{shape, make_schedule(request, shape), 0, {}}) {}

SplitPlan::SplitPlan(const PlanRequest& request, const KernelCost& cost)
    : SplitPlan(request, choose_cut(request, cost)) {}

std::string SplitPlan::describe() const {
  const std::string cut = schedule_.units_per_row == 1 ? "; rows stay whole, which costs less here than merging parts"
                          : schedule_.fixed_units ? concat("; every row in ", schedule_.units_per_row, " equal parts")
                                                  : "; cut where the groups' equal shares end";
  return concat("groups: ", schedule_.num_groups, " of ", shape_.blocks_per_group, " thread blocks",
                shape_.is_cluster ? " (a cluster)" : "", " for ", shape_.heads_per_block, " heads each, ",
                schedule_.num_units(), " units of ", schedule_.blocks_per_unit * kScheduledTokens, " entries", cut,
                reason_.empty() ? "" : "\n", reason_);
}

Status SplitPlan::run(const DecodeProblem& problem, void* workspace, void* stream) const {
  if (is_empty_) return {};
  const gpu::DeviceScope scope(device_);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  const Addresses addresses{problem.q, problem.q_rope, problem.out};
  SplitParams params{problem,
                     schedule_,
                     row_stride_bytes(problem.format),
                     nullptr,
                     nullptr,
                     check_queries(problem, addresses).ok(),
                     check_outputs(problem, addresses).ok(),
                     combine::is_large(schedule_, h_q_)};
  if (schedule_.num_slots() > 0) {
    params.part_out = static_cast<float*>(workspace);
    params.part_lse = reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + out_bytes());
  }
  CHIASMA_RETURN_IF_ERROR(launch(params, stream));
  return gpu::to_status(combine::launch({problem, schedule_, params.part_out, params.part_lse, params.out_is_vectors},
                                        static_cast<cudaStream_t>(stream)),
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
