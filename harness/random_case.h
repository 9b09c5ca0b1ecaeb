// Random case lines for differential tests, on any device.
#pragma once

#include <cstdint>

#include "harness/case.h"

namespace chiasma::harness {

// What the oracle does in some ten milliseconds on one core.
inline constexpr double kRandomCaseMultiplyAdds = 3e7;

// A small case with any mixture of options, a function of the arguments alone.
Case random_case(std::uint64_t key, double max_multiply_adds = kRandomCaseMultiplyAdds);

}  // namespace chiasma::harness
