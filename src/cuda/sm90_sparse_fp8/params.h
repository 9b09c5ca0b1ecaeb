// What a launch hands to the kernel.
#pragma once

#include "api/problem.h"
#include "cuda/sm90_sparse_fp8/slot_map.h"
#include "cuda/tile/schedule.h"

namespace chiasma::sm90_sparse_fp8 {

struct Params {
  DecodeProblem problem;
  tile::Schedule schedule;
  SlotMap slots;
  float* part_out;  // [schedule.num_slots(), h_q, 512], normalised
  float* part_lse;  // [schedule.num_slots(), h_q], natural log; -infinity: the part is empty and its out unwritten
};

}  // namespace chiasma::sm90_sparse_fp8
