// Host side of the kernel: what it supports, how it cuts the work, and the launch. No CUDA header is needed to include
// this.
#pragma once

#include <memory>

#include "api/registry.h"

namespace chiasma::sm90_sparse_fp8 {

// What every kernel of its kind needs, a query in one tensor of whole vectors, and one length a request.
Status check(const PlanRequest& request);
// With up to 64 heads the second block of a cluster would multiply zeros.
bool suits_crossover(const PlanRequest& request);
std::unique_ptr<PlannedDecode> plan_crossover(const PlanRequest& request);
std::unique_ptr<PlannedDecode> plan_baseline(const PlanRequest& request);

}  // namespace chiasma::sm90_sparse_fp8
