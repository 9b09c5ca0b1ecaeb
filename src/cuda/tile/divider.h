// Division by a number that is known before a kernel starts, as a multiplication.
#pragma once

#include <bit>
#include <cstdint>

#include "format/kv_format.h"

namespace chiasma::tile {

// n / divisor for 0 <= n < 2^31, 1 <= divisor <= 2^31: with 2^shift the first power of two that is no smaller than the
// divisor, the high half of n times 2^32 (2^shift / divisor - 1), rounded up, plus n, over 2^shift.
struct Divider {
  std::uint32_t multiplier, shift;

  static Divider make(std::uint32_t divisor) {
    std::uint32_t shift = 0;
    while ((std::uint64_t{1} << shift) < divisor) ++shift;
    const std::uint64_t excess = (std::uint64_t{1} << shift) - divisor;
    return {static_cast<std::uint32_t>((excess << 32) / divisor + 1), shift};
  }
  CHIASMA_HOST_DEVICE std::uint32_t divide(std::uint32_t n) const {
    return (static_cast<std::uint32_t>(std::uint64_t{multiplier} * n >> 32) + n) >> shift;
  }
};

}  // namespace chiasma::tile
