// What `chiasma inspect` finds out about the contents of tensors, whole or by samples.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "cli/cache_tensor.h"
#include "cli/safetensors.h"

namespace chiasma::cli {

struct Range {
  double least = std::numeric_limits<double>::infinity();
  double most = -std::numeric_limits<double>::infinity();

  void add(double value) {
    least = value < least ? value : least;
    most = value > most ? value : most;
  }
};

// Of a tensor of numbers.
struct NumberFindings {
  std::int64_t looked_at = 0, nan = 0, infinite = 0;
  Range range;  // of the finite ones
};

// Of the slots of a cache.
struct CacheFindings {
  std::int64_t slots = 0, looked_at = 0;
  std::int64_t nan_codes = 0, nonfinite_bf16 = 0;
  std::int64_t scales = 0, powers_of_two = 0, zero_scales = 0, bad_scales = 0;  // bad: negative, NaN, infinite
  Range scale_range;                                                            // of those that are finite
};

// Of indices into a cache. An entry counts once.
struct IndexFindings {
  std::int64_t entries = 0, minus_one = 0, other_negative = 0, beyond = 0, valid = 0;
  std::int64_t rows = 0, empty_rows = 0;  // empty: without a valid entry, lengths not considered
  Range range;                            // of the valid ones
};

// Whether numbers of this dtype can be looked at.
bool has_numbers(Dtype dtype);

// Unless `all`, large tensors are looked at in places, evenly spaced.
NumberFindings look_at_numbers(const SafetensorsFile& file, const SafetensorsTensor& tensor, bool all);
CacheFindings look_at_cache(const SafetensorsFile& file, const CacheTensor& cache, bool all);
// I32 or I64, all of it.
IndexFindings look_at_indices(const SafetensorsTensor& indices, std::int64_t num_slots);

}  // namespace chiasma::cli
