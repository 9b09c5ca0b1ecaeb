// The reference every backend is held against: float64, one plain loop per formula, never optimised.
#pragma once

#include <cstdint>

#include "api/problem.h"

namespace chiasma::cpu {

// Results for query tokens rows[0..num_rows) (request * s_q + query token). problem.out and problem.lse are not used.
// out [num_rows, h_q, 512]; lse [num_rows, h_q]; value_rms [num_rows, h_q] or null; term_rms [num_rows, h_q, 512] or
// null.
//
// value_rms = sink factor * sqrt(sum_t p_t * mean_c(V[t][c]^2)): the rms that a row of out would have if its values did
// not cancel. It carries the sink factor, as out does, so that a small factor does not loosen a bound made from it.
//
// term_rms = sink factor * sqrt(sum_t (p_t * (V[t][c] - o[c]))^2), o being out without the sink, and tokens of equal
// score being added up before they are squared: times e, the standard deviation of out[c] when each p_t is off by an
// independent share with standard deviation e and results are divided by the sum of the p_t as they are.
//
// NaN and infinity follow IEEE arithmetic: a NaN or +inf score makes out and lse of its row and head NaN; a score of
// -inf weighs 0, and a row whose valid scores are all -inf is NaN. Only a row without valid entries is (0, -inf).
//
// Scratch memory: the valid rows of one query token as doubles, that is up to 4608 bytes per selected entry.
void decode_oracle(const DecodeProblem& problem, const std::int64_t* rows, std::int64_t num_rows, double* out,
                   double* lse, double* value_rms, double* term_rms = nullptr);

}  // namespace chiasma::cpu
