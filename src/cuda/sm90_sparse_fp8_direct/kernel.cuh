// FP8 sparse MLA decode for Hopper without any 16-bit key tile. Design card: README.md beside this file.
//
// clang-format off
//   one thread block, 384 threads                      time ->
//   gatherer   | gather n+3     | gather n+4        | gather n+5       | ...           raw rows into a ring
//   math left  | score n  | softmax n | accumulate n, n+1 | score n+2  | softmax | ... S^T = K q^T, O^T += V^T P^T,
//   math right | accumulate n-2, n-1 | score n+1 | softmax n+1 | accumulate n, n+1 |   K and V from registers
// clang-format on
//
// Rows stay as they lie in the cache until they are operands: tokens (for QK) or output columns (for PV) are the rows
// of the left operand, which the tensor cores take from registers, and heads are the columns. So a block of 8, 16 or 32
// heads costs what it needs, and nothing is dequantised into memory. The math warpgroups score alternate blocks, so
// that one has the tensor cores while the other is in its softmax. More than 64 heads are neighbouring thread blocks
// that read the same rows, once from DRAM and then from L2.
#pragma once

#include "cuda/sm90_sparse_fp8_direct/gather_kv.cuh"
#include "cuda/sm90_sparse_fp8_direct/math_group.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// A barrier a thread.
template <typename Config>
__device__ void init_barriers(SmemPlan<Config>& smem) {
  int next = 0;
  const auto init = [&](std::uint64_t* barriers, int size, std::uint32_t count) {
    const int own = static_cast<int>(threadIdx.x) - next;
    if (own >= 0 && own < size) ptx::mbarrier_init(ptx::shared_address(barriers + own), count);
    next += size;
  };
  init(smem.kv_full, Config::kStages, kBlockTokens);
  init(smem.kv_empty[0], Config::kStages * kWarpsPerWarpgroup, kMathWarps);
  init(smem.piece_full, kPieceSlots, 1);
  init(smem.piece_empty, kPieceSlots, kMathWarps);
  init(smem.p_full, kMathGroups, kWarpgroupThreads);
  init(smem.p_empty, kMathGroups, kMathWarps);
  init(&smem.totals_full, 1, kWarpgroupThreads);
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ SplitParams params) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& smem = *reinterpret_cast<SmemPlan<Config>*>(shared_memory);

  init_barriers(smem);
  if (threadIdx.x == 0) smem.first_head = first_head_of_block<Config>(params);
  __syncthreads();

  const bool is_gatherer = threadIdx.x / kWarpgroupThreads == static_cast<int>(Role::gather);
  if (is_gatherer) {
    ptx::registers_lower<Config::kGatherRegisters>();
    Gatherer<Config>(params, smem).run();
  } else {
    ptx::registers_raise<Config::kMathRegisters>();
    MathGroup<Config>(params, smem).run();
  }
  // The first thread of a thread block to be here speaks for all; the math warpgroups are the last ones.
  if (params.merge_starts_early || !is_gatherer) ptx::grid_launch_dependents();
}

}  // namespace chiasma::sm90_sparse_fp8_direct
