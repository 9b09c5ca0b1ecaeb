// The pieces of one group of thread blocks, in order, with the rows' own lengths applied. The gatherer and the
// scorer walk the same list by themselves, which costs little: a piece is many blocks long.
#pragma once

#include "cuda/sm90_sparse_fp8_direct/config.h"
#include "cuda/split_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

static_assert(kBlockTokens == kScheduledTokens);

struct Work {
  tile::Piece piece;
  std::int32_t request, query_token;
  std::int32_t valid_entries;  // entries of the row that count, from the left
  std::int32_t num_blocks;     // from piece.first_block on; may be 0
};

// The piece that starts at *unit, which becomes the start of the next one; at first it is schedule.first_unit(group).
// False when the group has no more work.
__device__ __forceinline__ bool next_work(const SplitParams& params, std::int32_t group, std::int32_t* unit,
                                          Work* work) {
  const std::int32_t end_unit = params.schedule.first_unit(group + 1);
  if (*unit >= end_unit) return false;
  work->piece = params.schedule.piece_at(group, *unit, end_unit, unit);
  const auto s_q = static_cast<std::int32_t>(params.problem.s_q);
  work->request = work->piece.row / s_q;
  work->query_token = work->piece.row - work->request * s_q;
  const Selection& selection = params.problem.selection;
  work->valid_entries = static_cast<std::int32_t>(selection.topk);
  if (selection.length != nullptr) {
    work->valid_entries = min(max(selection.length[work->request * selection.length_stride], 0), work->valid_entries);
  }
  const std::int32_t needed = (work->valid_entries + kBlockTokens - 1) / kBlockTokens;
  work->num_blocks = max(min(work->piece.end_block, needed) - work->piece.first_block, 0);
  return true;
}

}  // namespace chiasma::sm90_sparse_fp8_direct
