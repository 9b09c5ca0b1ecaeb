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
};

// Queues the merge behind the decode kernel on `stream`, overlapping its launch with that kernel's end. Does nothing
// where the schedule splits nothing.
cudaError_t launch(const Params& params, cudaStream_t stream);

}  // namespace chiasma::combine
