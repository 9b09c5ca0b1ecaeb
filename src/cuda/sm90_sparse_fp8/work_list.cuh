// The pieces of one group of thread blocks, in order, with the rows' own lengths applied. Producers and math
// warpgroups walk the same list independently, which costs little: a piece is many blocks long.
#pragma once

#include "cuda/sm90_sparse_fp8/config.h"
#include "cuda/sm90_sparse_fp8/params.h"

namespace chiasma::sm90_sparse_fp8 {

struct Work {
  tile::Piece piece;
  std::int32_t request, query_token;
  std::int32_t valid_entries;  // entries of the row that count, from the left
  std::int32_t end_block;      // piece.end_block cut to what valid_entries reaches; may be <= piece.first_block
};

// first_unit(group) before the first call, then whatever next_work() left.
struct WorkCursor {
  std::int32_t unit;
};

// False when the group has no more work.
__device__ __forceinline__ bool next_work(const Params& params, std::int32_t group, WorkCursor& cursor, Work* work) {
  const std::int32_t end_unit = params.schedule.first_unit(group + 1);
  if (cursor.unit >= end_unit) return false;
  work->piece = params.schedule.piece_at(group, cursor.unit, end_unit, &cursor.unit);
  const auto s_q = static_cast<std::int32_t>(params.problem.s_q);
  work->request = work->piece.row / s_q;
  work->query_token = work->piece.row - work->request * s_q;
  const Selection& selection = params.problem.selection;
  work->valid_entries = static_cast<std::int32_t>(selection.topk);
  if (selection.length != nullptr) {
    // One for all query tokens of a request, see check().
    const std::int32_t length = selection.length[work->request * selection.length_stride_b];
    work->valid_entries = min(max(length, 0), work->valid_entries);
  }
  const std::int32_t needed = (work->valid_entries + kBlockTokens - 1) / kBlockTokens;
  work->end_block = work->piece.end_block < needed ? work->piece.end_block : needed;
  return true;
}

}  // namespace chiasma::sm90_sparse_fp8
