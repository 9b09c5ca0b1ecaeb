// Stage accumulate_pv: P of a block times half of its value columns, into one math warpgroup's accumulators.
#pragma once

#include "cuda/sm90_sparse_bf16/score_qk.cuh"

namespace chiasma::sm90_sparse_bf16 {

// [4 j + 2 r + c]: head 16 warp + lane / 4 + 8 r, column 8 j + 2 (lane % 4) + c of the group's 256.
using Output = float[kHeadsPerCta * kColumnsPerGroup / kWarpgroupThreads];

// A contraction step is 16 tokens: two groups of eight rows of a panel of values.
inline constexpr std::uint32_t kValueStepUnits = 2 * tile::kAtomBytes / 16;
inline constexpr std::uint32_t kProbabilityStepUnits = 2;

// Issues the products; operand(step): P of a step, registers or a descriptor.
template <typename Operand>
__device__ __forceinline__ void accumulate_pv(Output& output, std::uint32_t values, Operand&& operand) {
  const std::uint64_t v = tile::descriptor(values, kPanelBytes, tile::kAtomBytes);
  ptx::wgmma_pin(output);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kPvSteps; ++step) {
    ptx::wgmma_bf16_m64n256k16(output, operand(step), tile::advance(v, step * kValueStepUnits));
  }
  ptx::wgmma_commit();
}

}  // namespace chiasma::sm90_sparse_bf16
