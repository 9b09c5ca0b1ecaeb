// Stage score_qk: raw scores of one block, [64 heads, 64 tokens], by one warpgroup, in units of the tokens' RoPE
// factors. Codes enter as they are; the scales multiply the accumulators between the products of two scale tiles.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90_sparse_fp8/smem_plan.h"

namespace chiasma::sm90_sparse_fp8 {

// Accumulator registers of a 64 x 64 tile: [4 j + 2 r + c] is head 16 warp + lane / 4 + 8 r, token 8 j + 2 (lane % 4) +
// c.
inline constexpr int kScoresPerThread = kHeadsPerCta * kBlockTokens / kWarpgroupThreads;
using ScoreTile = float[kScoresPerThread];

// Descriptor distances, in 16-byte units: between panels, and between contraction steps within one.
inline constexpr std::uint32_t kPanelUnits = kPanelBytes / 16;
inline constexpr std::uint32_t kKeyStepUnits = 2;

// Issues the products of panels [kFirst, kFirst + kCount).
template <int kFirst, int kCount>
__device__ __forceinline__ void multiply_panels(ScoreTile& scores, const SmemPlan& smem, std::uint32_t stage) {
  constexpr int kStepsPerPanel = tile::kPanelColumns / 16;
  const std::uint64_t q = tile::descriptor(ptx::shared_address(smem.q), 0, tile::kAtomBytes);
  const std::uint64_t kv = tile::descriptor(ptx::shared_address(smem.kv[stage]), 0, tile::kAtomBytes);
  ptx::wgmma_pin(scores);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kCount * kStepsPerPanel; ++step) {
    const std::uint32_t offset = (kFirst + step / kStepsPerPanel) * kPanelUnits + step % kStepsPerPanel * kKeyStepUnits;
    ptx::wgmma_m64n64k16(scores, tile::advance(q, offset), tile::advance(kv, offset), kFirst + step > 0);
  }
  ptx::wgmma_commit();
}

// Two tokens' steps from one scale tile to the next, for each of the thread's token pairs.
using Ratios = float2[kBlockTokens / 8];

__device__ __forceinline__ void load_ratios(Ratios& ratios, const TokenGroup (&groups)[kTokenGroups], int tile,
                                            int lane) {
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const StoredScales& stored = groups[group_of_pair(j, lane)].stored;
    ratios[j] = reinterpret_cast<const float2*>(stored.ratio[tile])[half_of_pair(lane)];
  }
}

__device__ __forceinline__ void wait_for_half(const SmemPlan& smem, std::uint32_t stage, int half,
                                              std::uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&smem.kv_full[stage][half]), parity);
}

// The products of a scale tile, then the step from its scale to the next one's. meanwhile() is called while they are
// under way, after the last look at the ratios.
template <int kTile, typename Meanwhile>
__device__ __forceinline__ void score_tile(ScoreTile& scores, const SmemPlan& smem, std::uint32_t stage, int lane,
                                           Meanwhile&& meanwhile) {
  multiply_panels<kTile * kPanelsPerScale, kPanelsPerScale>(scores, smem, stage);
  Ratios ratios;
  load_ratios(ratios, smem.tokens[stage], kTile, lane);
  meanwhile();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(scores);
#pragma unroll
  for (int i = 0; i < kScoresPerThread; ++i) scores[i] *= i % 2 == 0 ? ratios[i / 4].x : ratios[i / 4].y;
}

static_assert(kScaleTiles == 4 && kHalves == 2 && kRopePanel == kScaleTiles * kPanelsPerScale);

__device__ __forceinline__ void score_first_half(ScoreTile& scores, const SmemPlan& smem, std::uint32_t stage,
                                                 std::uint32_t parity, int lane) {
  wait_for_half(smem, stage, 0, parity);
  score_tile<0>(scores, smem, stage, lane, [] {});
  score_tile<1>(scores, smem, stage, lane, [] {});
}

// The products of the RoPE panel are still under way at the end.
__device__ __forceinline__ void score_second_half(ScoreTile& scores, SmemPlan& smem, std::uint32_t stage,
                                                  std::uint32_t parity, int warpgroup, int warp, int lane) {
  wait_for_half(smem, stage, 1, parity);
  score_tile<2>(scores, smem, stage, lane, [] {});
  score_tile<3>(scores, smem, stage, lane,
                [&] { weigh_tokens(smem.tokens[stage], smem.far_units, smem.any_valid, warpgroup, warp, lane); });
  multiply_panels<kRopePanel, 1>(scores, smem, stage);
}

}  // namespace chiasma::sm90_sparse_fp8
