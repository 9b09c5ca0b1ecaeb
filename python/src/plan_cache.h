// Plans of earlier calls, so that a decode of known shapes plans nothing.
#pragma once

#include <memory>

#include "chiasma/chiasma.h"

namespace chiasma::python {

using PlanPointer = std::shared_ptr<const chiasma_decode_plan>;

// A plan for a call with these shapes, strides, dtypes, devices and options; from the cache if there is one, which
// holds plans alone: no tensor, no device memory. Safe from any thread. Throws Failure.
PlanPointer find_plan(const chiasma_decode_args& args, const chiasma_plan_options& options);

}  // namespace chiasma::python
