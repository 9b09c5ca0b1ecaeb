// FP8 sparse MLA decode for Hopper. Design card: README.md beside this file.
//
//   one block, 512 threads                       time ->
//   producers   | dequantize n+1 | gather n+2 ...              | dequantize n+2 | gather n+3 ...
//   math wg 0   | score_qk n, 2nd half | softmax n | pv n      | score_qk n+2, 1st half | pv n+1 | 2nd half ...
//   math wg 1   | pv n-1 | score_qk n+1, 1st half | pv n       | score_qk n+1, 2nd half | softmax n+1 | pv n+1 ...
//
// Two key tiles of 64 tokens; block n of a thread block lives in stage n % 2 and is scored by math warpgroup n % 2.
// Tiles hold bare codes: scales enter between the products of two scale tiles in QK, and in the weights of PV. Each
// warpgroup accumulates its own 256 of the 512 output columns, two scale tiles, over all blocks, with P from its
// registers for the blocks it scored and from shared memory for the other's. With crossover a cluster of two shares a
// query token: each block dequantises half of every tile's rows and copies them to the other. Without it tiles come
// later, and both halves of score_qk n+1 follow pv n.
#pragma once

#include "cuda/sm90_sparse_fp8/consumer.cuh"
#include "cuda/sm90_sparse_fp8/producer.cuh"

namespace chiasma::sm90_sparse_fp8 {

template <typename Variant>
__device__ void init_barriers(SmemPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    for (std::uint64_t& half : smem.kv_full[stage]) ptx::mbarrier_init(ptx::shared_address(&half), kProducerWarps);
    ptx::mbarrier_init(ptx::shared_address(&smem.kv_empty[stage]),
                       kMathWarpgroups * kWarpsPerWarpgroup * Variant::kClusterSize);
    ptx::mbarrier_init(ptx::shared_address(&smem.p_full[stage]), kWarpgroupThreads);
  }
  ptx::fence_mbarrier_init();
}

template <typename Variant>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ Params params) {
  extern __shared__ std::uint8_t shared_memory[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared_memory);
  constexpr bool kCrossover = Variant::kClusterSize > 1;
  // The thread blocks that share a query token: a cluster, or neighbours without one.
  const std::int32_t head_groups = (params.problem.h_q + kHeadsPerCta - 1) / kHeadsPerCta;
  const std::int32_t blocks_per_group = kCrossover ? Variant::kClusterSize : head_groups;
  const std::int32_t group = blockIdx.x / blocks_per_group;
  const std::int32_t rank = blockIdx.x % blocks_per_group;

  if (threadIdx.x == 0) {
    init_barriers<Variant>(smem);
    smem.group = group;
    smem.first_head = rank * kHeadsPerCta;
    smem.first_row = kCrossover ? rank * kBlockTokens / Variant::kClusterSize : 0;
  }
  if constexpr (kCrossover) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }

  if (threadIdx.x >= kMathThreads) {
    ptx::registers_lower<kProducerRegisters>();
    Producer<Variant>(params, smem).run();
  } else {
    ptx::registers_raise<kMathRegisters>();
    Consumer<Variant>(params, smem).run();
  }
  ptx::grid_launch_dependents();
  // The peer may still store into this block, or arrive on its barriers.
  if constexpr (kCrossover) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace chiasma::sm90_sparse_fp8
