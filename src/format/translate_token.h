// From a token of a request to a slot of a cache, for host and device.
#pragma once

#include <cstdint>

#include "format/kv_format.h"

namespace chiasma {

inline constexpr std::int32_t kNoSlot = -1;
inline constexpr std::int64_t kMostSlot = 0x7fffffff;

CHIASMA_HOST_DEVICE constexpr std::int32_t slot_or_none(std::int64_t slot) {
  return slot >= 0 && slot <= kMostSlot ? static_cast<std::int32_t>(slot) : kNoSlot;
}

// How context parallelism deals tokens out: in runs of `interleave`, to `world` ranks in turns.
struct ContextShare {
  std::int64_t world, rank, interleave;
};

// The token's number in this rank's own cache; -1 for other ranks' tokens and for those that are none.
CHIASMA_HOST_DEVICE constexpr std::int64_t own_token(const ContextShare& share, std::int64_t token) {
  if (token < 0) return -1;
  if (share.world == 1) return token;
  const std::int64_t run = token / share.interleave;
  if (run % share.world != share.rank) return -1;
  return run / share.world * share.interleave + token % share.interleave;
}

// page: an entry of a block table.
CHIASMA_HOST_DEVICE constexpr std::int32_t slot_in_page(std::int32_t page, std::int64_t page_size,
                                                        std::int64_t offset) {
  return page < 0 ? kNoSlot : slot_or_none(page * page_size + offset);
}

}  // namespace chiasma
