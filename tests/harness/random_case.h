// Random case lines for differential tests.
#pragma once

#include <cstdint>

#include "harness/case.h"

namespace chiasma::harness {

// A small case with any mixture of options, a function of the key alone.
Case random_case(std::uint64_t key);

}  // namespace chiasma::harness
