// The machine's multiply-add ceiling, which the decode's speed is stated against.
#pragma once

#include <cstdint>

namespace chiasma::bench {

// Runs `rounds` of independent vector multiply-adds on registers alone; returns how many floating-point operations that
// were. *sink keeps the result alive.
std::int64_t run_fma_peak(std::int64_t rounds, float* sink);

}  // namespace chiasma::bench
