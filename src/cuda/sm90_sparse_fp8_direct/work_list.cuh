// The pieces of one group of thread blocks, in order, with the rows' own lengths applied. The gatherer walks the list
// and describes every piece to the math warpgroups.
#pragma once

#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_direct/config.h"
#include "cuda/split_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

static_assert(kBlockTokens == kScheduledTokens);

struct Work {
  tile::Piece piece;
  std::int32_t request, query_token;
  std::int32_t valid_entries;  // entries of the row that count, from the left
  std::int32_t num_blocks;     // from piece.first_block on; may be 0, and is kNoMoreWork behind the last piece
  // Of the second cache, whose blocks follow those of the first that count.
  std::int32_t valid_extra;
  static constexpr std::int32_t kNoMoreWork = -1;

  __device__ std::int32_t blocks_of_first_cache() const { return (valid_entries + kBlockTokens - 1) / kBlockTokens; }
};

// Which part of the problem a thread block works on: the group that shares rows, and its heads of all. PERF: the group
// is worked out where it is needed, once a piece, and the first head once, for shared memory; registers keep neither.
template <typename Config>
__device__ __forceinline__ std::int32_t head_groups(const SplitParams& params) {
  return (params.problem.h_q + Config::kHeads - 1) / Config::kHeads;
}
template <typename Config>
__device__ __forceinline__ std::int32_t group_of_block(const SplitParams& params) {
  return static_cast<std::int32_t>(blockIdx.x) / head_groups<Config>(params);
}
template <typename Config>
__device__ __forceinline__ int first_head_of_block(const SplitParams& params) {
  return static_cast<int>(blockIdx.x) % head_groups<Config>(params) * Config::kHeads;
}

__device__ __forceinline__ std::int32_t entries_that_count(const Selection& selection, const Work& work) {
  const auto topk = static_cast<std::int32_t>(selection.topk);
  if (selection.length == nullptr) return topk;
  const std::int32_t length =
      selection.length[work.request * selection.length_stride_b + work.query_token * selection.length_stride_s];
  return min(max(length, 0), topk);
}

// The piece that starts at *unit, which becomes the start of the next one; at first it is schedule.first_unit(group).
template <typename Config>
__device__ __forceinline__ Work next_work(const SplitParams& params, std::int32_t group, std::int32_t* unit) {
  Work work{};
  const std::int32_t end_unit = params.schedule.first_unit(group + 1);
  if (*unit >= end_unit) {
    ptx::grid_dependency_wait();
    work.num_blocks = Work::kNoMoreWork;
    return work;
  }
  work.piece = params.schedule.piece_at(group, *unit, end_unit, unit);
  const auto s_q = static_cast<std::int32_t>(params.problem.s_q);
  work.request = work.piece.row / s_q;
  work.query_token = work.piece.row - work.request * s_q;
  // Up to here all is arithmetic, which may go on while the kernel in front of this one is still at work.
  ptx::grid_dependency_wait();
  work.valid_entries = entries_that_count(params.problem.selection, work);
  std::int32_t needed = work.blocks_of_first_cache();
  if constexpr (Config::kHasSecondCache) {
    work.valid_extra = entries_that_count(params.problem.extra_selection, work);
    needed += (work.valid_extra + kBlockTokens - 1) / kBlockTokens;
  }
  work.num_blocks = max(min(work.piece.end_block, needed) - work.piece.first_block, 0);
  return work;
}

// Query of a piece from one head on: the columns that meet codes, and the rotary ones.
__device__ __forceinline__ const bf16_t* query_of(const DecodeProblem& problem, const Work& work, int head) {
  return problem.q + work.request * problem.q_stride_b + work.query_token * problem.q_stride_s +
         head * problem.q_stride_h;
}
__device__ __forceinline__ const bf16_t* query_rope_of(const DecodeProblem& problem, const Work& work, int head) {
  return problem.q_rope + work.request * problem.q_rope_stride_b + work.query_token * problem.q_rope_stride_s +
         head * problem.q_rope_stride_h;
}

}  // namespace chiasma::sm90_sparse_fp8_direct
