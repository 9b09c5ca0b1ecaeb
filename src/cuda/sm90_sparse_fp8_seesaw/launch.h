// How the registry reaches this kernel; check_split_request() says what it can do.
#pragma once

#include <memory>

#include "api/registry.h"

namespace chiasma::sm90_sparse_fp8_seesaw {

std::unique_ptr<PlannedDecode> plan(const PlanRequest& request);
// Of a decode by this kernel, by the model of split_cost.h.
double estimate_us(const PlanRequest& request);

}  // namespace chiasma::sm90_sparse_fp8_seesaw
