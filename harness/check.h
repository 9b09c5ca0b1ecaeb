// Compares the outputs that a run left in a workload with the float64 oracle. docs/numerics.md explains the bounds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/workload.h"

namespace chiasma::harness {

// Bounds of one class of kernels for one row (request, query token, head).
struct Tolerance {
  const char* name;
  double out_relative_l2;  // of the row
  double out_of_rms;       // every element: out_of_rms * rms(row) + out_of_value * abs(reference)
  double out_of_value;
  double lse;              // times max(1, abs(reference))
  double score_deviation;  // the bounds hold up to here and grow in proportion beyond
  // What each probability may be off by, of itself; 0: the bounds above hold all that it costs. Elsewhere four times
  // it, times the rms of the terms that an element is a sum of (term_rms of chiasma_decode_oracle()), is allowed on top
  // of rounding out, where that is more; of a row, only if its values have very different sizes.
  double probability = 0;
  bool rows_are_uneven = false;
};

// Of a device's kernels: none rounds a key, and those of a GPU round values or probabilities to 16 bits.
Tolerance tolerance_of(chiasma_device_kind device, const Case& spec);

struct CheckOptions {
  // The oracle may cost this many multiply-adds; where all rows would cost more, the first, the last and hashed ones
  // in between are checked.
  double max_multiply_adds = 4e9;
  // Query tokens to check (request * s_q + query token); empty: chosen by max_multiply_adds.
  std::vector<std::int64_t> rows;
};

struct CheckReport {
  bool passed = false;
  std::int64_t rows_total = 0;    // query tokens of the case
  std::int64_t rows_checked = 0;  // query tokens that were compared, all heads of each
  double mean_relative_l2 = 0;    // of out, over the finite, nonzero rows compared
  double max_relative_l2 = 0;
  double worst_element = 0;  // error of the worst element of out as a fraction of what is allowed; > 1 fails
  double max_lse_error = 0;  // over max(1, abs(reference))
  double worst_lse = 0;      // the same as a fraction of what is allowed
  double max_score_deviation = 0;
  std::string failure;  // the first one: which row and head, value, reference, bound; empty when passed
};

// Also checks Workload::guards_intact().
CheckReport check(const Workload& workload, const Tolerance& tolerance, const CheckOptions& options = {});

// All rows of a call that no case line describes. Its tensors, out and lse included, are on the CPU.
CheckReport check_decode(const chiasma_decode_args& args, const Tolerance& tolerance);

}  // namespace chiasma::harness
