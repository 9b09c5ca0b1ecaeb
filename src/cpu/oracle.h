// The reference every backend is held against: float64, one plain loop per formula, never optimised.
#pragma once

#include <cstdint>

#include "api/problem.h"

namespace chiasma::cpu {

// Results for query tokens rows[0..num_rows) (request * s_q + query token). problem.out and problem.lse are not used.
// out [num_rows, h_q, 512]; lse [num_rows, h_q]; value_rms [num_rows, h_q] or null.
void decode_oracle(const DecodeProblem& problem, const std::int64_t* rows, std::int64_t num_rows, double* out, double* lse,
                   double* value_rms);

}  // namespace chiasma::cpu
