// Stage score_qk: raw scores of one block, [64 heads, 64 tokens], by one warpgroup.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90_sparse_fp8/smem_plan.h"

namespace chiasma::sm90_sparse_fp8 {

// Accumulator registers of a 64 x 64 tile: [4 j + 2 r + c] is head 16 warp + lane / 4 + 8 r, token 8 j + 2 (lane % 4) +
// c.
inline constexpr int kScoresPerThread = kHeadsPerCta * kBlockTokens / kWarpgroupThreads;
using ScoreTile = float[kScoresPerThread];

__device__ __forceinline__ void score_qk(ScoreTile& scores, const SmemPlan& smem, std::uint32_t stage) {
  constexpr int kStepsPerPanel = tile::kPanelColumns / 16;
  const std::uint64_t q = tile::descriptor(ptx::shared_address(smem.q), 0, tile::kAtomBytes);
  const std::uint64_t kv = tile::descriptor(ptx::shared_address(smem.kv[stage]), 0, tile::kAtomBytes);
  ptx::wgmma_pin(scores);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeyPanels * kStepsPerPanel; ++step) {
    // Descriptors count 16-byte units.
    const int offset = (step / kStepsPerPanel * kPanelBytes + step % kStepsPerPanel * 32) / 16;
    ptx::wgmma_m64n64k16(scores, q + offset, kv + offset, step > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace chiasma::sm90_sparse_fp8
