// FP8 sparse MLA decode for Hopper without any 16-bit key tile. Design card: README.md beside this file.
//
//   one block, 512 threads           time ->
//   gatherer      | gather n+2           | gather n+3           | ...        raw rows into a ring in shared memory
//   scorer        | score n+1 | softmax  | score n+2 | softmax  | ...        S^T = K q^T, K from registers
//   accumulators  | accumulate n         | accumulate n+1       | ...        O^T += V^T P^T, V from registers
//
// Rows stay as they lie in the cache until they are operands: tokens (for QK) or output columns (for PV) are the rows
// of the left operand, which the tensor cores take from registers, and heads are the columns. So a block of 8, 16 or 32
// heads costs what it needs, and nothing is dequantised into memory. More than 64 heads are neighbouring thread blocks
// that read the same rows, once from DRAM and then from L2.
#pragma once

#include "cuda/sm90_sparse_fp8_direct/accumulator.cuh"
#include "cuda/sm90_sparse_fp8_direct/gather_kv.cuh"
#include "cuda/sm90_sparse_fp8_direct/scorer.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

template <typename Config>
__device__ void init_barriers(SmemPlan<Config>& smem) {
  const auto init = [](std::uint64_t* barriers, int size, std::uint32_t count) {
    for (int i = 0; i < size; ++i) ptx::mbarrier_init(ptx::shared_address(barriers + i), count);
  };
  init(smem.kv_full, Config::kStages, kWarpsPerWarpgroup);
  init(&smem.q_full, 1, kQueryFullCount);
  init(&smem.q_empty, 1, kWarpsPerWarpgroup);
  init(smem.kv_empty[0], Config::kStages * kWarpsPerWarpgroup, kAccumulatorWarps);
  init(smem.note_full, kNotes, kWarpsPerWarpgroup);
  init(smem.note_empty, kNotes, kAccumulatorWarps);
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ SplitParams params) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& smem = *reinterpret_cast<SmemPlan<Config>*>(shared_memory);
  const std::int32_t head_groups = (params.problem.h_q + Config::kHeads - 1) / Config::kHeads;
  const std::int32_t group = blockIdx.x / head_groups;
  const int first_head = static_cast<int>(blockIdx.x % head_groups) * Config::kHeads;

  if (threadIdx.x == 0) {
    init_barriers(smem);
    smem.group = group;
    smem.first_head = first_head;
    smem.query_phase = 1;
    smem.unit = params.schedule.first_unit(group);
  }
  ptx::grid_dependency_wait();
  __syncthreads();

  switch (static_cast<Role>(threadIdx.x / kWarpgroupThreads)) {
    case Role::score:
      ptx::registers_raise<Config::kScoreRegisters>();
      Scorer<Config>(params, smem).run();
      break;
    case Role::accumulate_left:
    case Role::accumulate_right: {
      ptx::registers_raise<Config::kAccumulateRegisters>();
      const int number = threadIdx.x / kWarpgroupThreads - static_cast<int>(Role::accumulate_left);
      Accumulator<Config>(params.problem, smem, first_head, number).run();
      break;
    }
    case Role::gather:
      ptx::registers_lower<Config::kGatherRegisters>();
      Gatherer<Config>(params, smem).run();
      break;
  }
  // The first thread of a thread block to be here speaks for all; the accumulators are the last ones.
  const bool accumulates = threadIdx.x >= kWarpgroupThreads && threadIdx.x < 3 * kWarpgroupThreads;
  if (params.merge_starts_early || accumulates) ptx::grid_launch_dependents();
}

}  // namespace chiasma::sm90_sparse_fp8_direct
