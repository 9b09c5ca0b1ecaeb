// Merges the partial results of split rows. The decode kernels leave parts in scratch memory by the slots of a
// tile::Schedule; this writes the caller's out and lse.
#pragma once

#include <cuda_runtime.h>

#include "api/problem.h"
#include "cuda/tile/schedule.h"

namespace chiasma::combine {

struct Params {
  DecodeProblem problem;
  tile::Schedule schedule;
  const float* part_out;  // [schedule.num_slots(), h_q, 512], normalised
  const float* part_lse;  // [schedule.num_slots(), h_q], natural log
  bool out_is_vectors;    // out lies in multiples of 16 bytes
};

// PERF: large merges gain from starting before the decode has quite ended, since their thread blocks take a while to
// start. Small ones lose, since those that start early crowd the few multiprocessors without a decode (H200,
// 2026-11-30: 128 heads, b=1 12.5 us late and 13.6 early, b=16 34.2 and 33.6).
inline constexpr std::int64_t kLargeMergeHeads = 1024;
inline bool is_large(const tile::Schedule& schedule, int h_q) {
  return std::int64_t{schedule.num_candidates()} * h_q > kLargeMergeHeads;
}

// Queues the merge behind the decode kernel on `stream`, overlapping its launch with that kernel's end. Does nothing
// where the schedule splits nothing.
cudaError_t launch(const Params& params, cudaStream_t stream);

}  // namespace chiasma::combine
