// The reference every backend is held against: float64, one plain loop per formula, never optimised.
#pragma once

#include <cstdint>

#include "api/problem.h"

namespace chiasma::cpu {

// Results for query tokens rows[0..num_rows) (request * s_q + query token). problem.out and problem.lse are not used.
// out [num_rows, h_q, 512]; lse [num_rows, h_q]; value_rms [num_rows, h_q] or null.
//
// value_rms = sink factor * sqrt(sum_t p_t * mean_c(V[t][c]^2)): the rms that a row of out would have if its values did
// not cancel. It carries the sink factor, as out does, so that a small factor does not loosen a bound made from it.
//
// NaN and infinity follow IEEE arithmetic: a NaN or +inf score makes out and lse of its row and head NaN; a score of
// -inf weighs 0, and a row whose valid scores are all -inf is NaN. Only a row without valid entries is (0, -inf).
//
// Scratch memory: the valid rows of one query token as doubles, that is up to 4608 bytes per selected entry.
void decode_oracle(const DecodeProblem& problem, const std::int64_t* rows, std::int64_t num_rows, double* out,
                   double* lse, double* value_rms);

}  // namespace chiasma::cpu
