// Host side of the kernel: what it supports, how it cuts the work, and the launch. No CUDA header is needed to include
// this.
#pragma once

#include <memory>

#include "api/registry.h"

namespace chiasma::sm90_sparse_bf16 {

Status check(const PlanRequest& request);
std::unique_ptr<PlannedDecode> plan(const PlanRequest& request);
double estimate_us(const PlanRequest& request);

}  // namespace chiasma::sm90_sparse_bf16
