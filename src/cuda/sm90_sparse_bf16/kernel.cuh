// Sparse MLA decode for Hopper over unquantised caches. Design card: README.md beside this file.
//
// clang-format off
//   one thread block, 384 threads              time ->
//   gatherer   | rows n+2 ...              | rows n+3 ...         | ...                 swizzled panels, two blocks
//   math left  | score n  | softmax n  | accumulate n | n+1 | score n+2 | ...           S = q K^T, O += P V: both
//   math right |      score n+1 | softmax n+1 | accumulate n, n+1 | score n+3 | ...     from shared memory
// clang-format on
#pragma once

#include "cuda/sm90_sparse_bf16/gather_rows.cuh"
#include "cuda/sm90_sparse_bf16/math_group.cuh"

namespace chiasma::sm90_sparse_bf16 {

template <typename Config>
__device__ void init_barriers(SmemPlan<Config>& smem) {
  const auto init = [](std::uint64_t& barrier, std::uint32_t count) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), count);
  };
  for (int stage = 0; stage < kStages; ++stage) {
    init(smem.kv_full[stage], kWarpgroupThreads + kBlockTokens);
    init(smem.kv_empty[stage], kMathWarps);
    init(smem.p_full[stage], kWarpgroupThreads);
  }
  for (int slot = 0; slot < kPieceSlots; ++slot) {
    init(smem.piece_full[slot], 1);
    init(smem.piece_empty[slot], kMathWarps);
  }
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ SplitParams params) {
  extern __shared__ std::uint8_t shared_memory[];
  auto& smem = *reinterpret_cast<SmemPlan<Config>*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem);
    smem.first_head = direct::first_head_of_block<Config>(params);
  }
  __syncthreads();

  const bool is_gatherer = threadIdx.x / kWarpgroupThreads == static_cast<int>(Role::gather);
  if (is_gatherer) {
    ptx::registers_lower<kGatherRegisters>();
    Gatherer<Config>(params, smem).run();
  } else {
    ptx::registers_raise<kMathRegisters>();
    MathGroup<Config>(params, smem).run();
  }
  // The first thread of a thread block to be here speaks for all; the math warpgroups are the last ones.
  if (params.merge_starts_early || !is_gatherer) ptx::grid_launch_dependents();
}

}  // namespace chiasma::sm90_sparse_bf16
