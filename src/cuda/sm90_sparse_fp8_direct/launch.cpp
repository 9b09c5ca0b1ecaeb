#include "cuda/sm90_sparse_fp8_direct/launch.h"

#include <cstdint>

#include "cuda/sm90_sparse_fp8_direct/config.h"
#include "cuda/sm90_sparse_fp8_direct/launch_rows.h"
#include "cuda/split_cost.h"

namespace chiasma::sm90_sparse_fp8_direct {
namespace {

// Measured on an H200 (driver 580.159.04, 2026-11-30): graphs of calls with 128 heads and whole rows of 1 to 32 blocks,
// all multiprocessors busy. Parts: rows in 2 to 32 parts against the same without. Of v32; the others have fewer
// columns.
constexpr KernelCost kCost = {
    {{{8, 5.9, 1.24, 2.0}, {16, 6.2, 1.28, 3.0}, {32, 7.0, 1.55, 4.5}, {64, 9.7, 2.25, 9.8}}},
    8.0,
};
// The same for formats whose thread blocks take 32 heads at most.
constexpr KernelCost kCostOf32Heads = {{{kCost.heads[0], kCost.heads[1], kCost.heads[2], kCost.heads[2]}},
                                       kCost.store_tb_per_s};
// For bf16 rows, of which two blocks fit and not four. Set so that one request is cut as with the constants above,
// which takes 12.2 us with 128 heads (H200, 2026-12-01), and so that many requests go to the kernel for bf16 rows
// alone.
constexpr KernelCost kCostOfBf16 = {
    {{{8, 5.9, 1.9, 2.0}, {16, 6.2, 1.95, 3.0}, {32, 7.0, 2.4, 4.5}, {32, 7.0, 2.4, 4.5}}}, kCost.store_tb_per_s};
const KernelCost& cost_of(const PlanRequest& request) {
  switch (request.problem.format) {
    case KvFormat::v4: return kCostOf32Heads;
    case KvFormat::bf16:
    case KvFormat::bf16nope: return kCostOfBf16;
    default: return kCost;
  }
}
static_assert(Rows<KvFormat::v4>::kMostHeadsPerCta == kCostOf32Heads.heads.back().heads);
static_assert(Rows<KvFormat::bf16>::kMostHeadsPerCta == kCostOfBf16.heads.back().heads);
static_assert(kCost.heads.front().heads == kMinHeadsPerCta && kCost.heads.back().heads == kMaxHeadsPerCta);

constexpr KvFormat kFormats[] = {
    KvFormat::v32,      KvFormat::v32nope, KvFormat::v32nope_compact, KvFormat::v4,   KvFormat::v41,
    KvFormat::v41plane, KvFormat::fp8,     KvFormat::fp8nope,         KvFormat::bf16, KvFormat::bf16nope};

class Plan final : public SplitPlan {
 public:
  explicit Plan(const PlanRequest& request) : SplitPlan(request, cost_of(request)) {}

 private:
  Status launch(const SplitParams& given, void* stream) const override {
    const Launch launch{heads_per_block(), device(), num_groups(), stream};
    SplitParams params = given;
    // One scale of all keys is one of all scores.
    params.problem.sm_scale *= params.problem.kv.scale;
    switch (params.problem.format) {
      case KvFormat::v32: return launch_rows<KvFormat::v32>(params, launch);
      // They differ in the distance between rows alone.
      case KvFormat::v32nope:
      case KvFormat::v32nope_compact: return launch_rows<KvFormat::v32nope>(params, launch);
      case KvFormat::v4: return launch_rows<KvFormat::v4>(params, launch);
      case KvFormat::v41: return launch_rows<KvFormat::v41>(params, launch);
      case KvFormat::v41plane: return launch_rows<KvFormat::v41plane>(params, launch);
      case KvFormat::fp8: return launch_rows<KvFormat::fp8>(params, launch);
      case KvFormat::fp8nope: return launch_rows<KvFormat::fp8nope>(params, launch);
      case KvFormat::bf16: return launch_rows<KvFormat::bf16>(params, launch);
      case KvFormat::bf16nope: return launch_rows<KvFormat::bf16nope>(params, launch);
    }
    return {CHIASMA_INTERNAL_ERROR, "a format without a kernel"};
  }
};

}  // namespace

Status check(const PlanRequest& request) {
  return check_split_request(request, kFormats);
}

std::unique_ptr<PlannedDecode> plan(const PlanRequest& request) {
  return std::make_unique<Plan>(request);
}

double estimate_us(const PlanRequest& request) {
  return choose_cut(request, cost_of(request)).us;
}

}  // namespace chiasma::sm90_sparse_fp8_direct
