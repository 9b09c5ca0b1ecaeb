// From a slot to its page without a division, which costs the producers twenty instructions a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "api/problem.h"

namespace chiasma::sm90_sparse_fp8 {

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

struct SlotMap {
  Divider page_divider;
  std::uint32_t page_size;
  std::uint32_t num_slots;  // that a non-negative index can name

  static SlotMap make(const KvPool& pool) {
    constexpr std::int64_t kMost = std::int64_t{1} << 31;
    // An index never leaves the first page of a larger size.
    const auto page_size = static_cast<std::uint32_t>(std::clamp<std::int64_t>(pool.page_size, 1, kMost));
    return {Divider::make(page_size), page_size, static_cast<std::uint32_t>(std::min(pool.num_slots(), kMost))};
  }
};

}  // namespace chiasma::sm90_sparse_fp8
