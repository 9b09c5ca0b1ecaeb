// From a slot to its page without a division, which costs the producers twenty instructions a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "api/problem.h"
#include "cuda/tile/divider.h"

namespace chiasma::sm90_sparse_fp8 {

using tile::Divider;

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
