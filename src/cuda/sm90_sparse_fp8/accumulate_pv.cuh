// Stage accumulate_pv: one block's P times this warpgroup's half of its value columns, into the accumulators.
#pragma once

#include "cuda/sm90_sparse_fp8/score_qk.cuh"

namespace chiasma::sm90_sparse_fp8 {

// The 256 columns of a warpgroup as two accumulator tiles, one a scale tile: values are bare codes, and P carries the
// scale.
inline constexpr int kOutputTiles = kScaleTiles / kMathWarpgroups;
inline constexpr int kTileColumns = kColumnsPerWarpgroup / kOutputTiles;
static_assert(kTileColumns == v32::kTileDim);
// [4 j + 2 r + c]: head 16 warp + lane / 4 + 8 r, column 8 j + 2 (lane % 4) + c of the tile.
using OutputTile = float[kTileColumns / 2];

inline constexpr int kPvSteps = kBlockTokens / 16;

__device__ __forceinline__ std::uint64_t value_descriptor(const SmemPlan& smem, std::uint32_t stage, int warpgroup) {
  constexpr int kPanels = kColumnsPerWarpgroup / tile::kPanelColumns;
  return tile::descriptor(ptx::shared_address(smem.kv[stage][warpgroup * kPanels]), kPanelBytes, tile::kAtomBytes);
}

// Descriptor distances, in 16-byte units: contraction step k covers tokens [16 k, 16 k + 16), two groups of eight rows.
inline constexpr std::uint32_t kValueStepUnits = 2 * tile::kAtomBytes / 16;
inline constexpr std::uint32_t kValueTileUnits = kTileColumns / tile::kPanelColumns * kPanelUnits;
inline constexpr std::uint32_t kProbabilityStepUnits = 2;

// Issues the products; operand(tile, step) is P of an output tile and contraction step, a register fragment or a
// descriptor.
template <typename Operand>
__device__ __forceinline__ void accumulate_pv(OutputTile (&output)[kOutputTiles], std::uint64_t values,
                                              Operand&& operand) {
#pragma unroll
  for (int tile = 0; tile < kOutputTiles; ++tile) ptx::wgmma_pin(output[tile]);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kPvSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) {
      ptx::wgmma_m64n128k16(output[n], operand(n, step),
                            tile::advance(values, step * kValueStepUnits + n * kValueTileUnits));
    }
  }
  ptx::wgmma_commit();
}

__device__ __forceinline__ void wait_for_pv(OutputTile (&output)[kOutputTiles]) {
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int tile = 0; tile < kOutputTiles; ++tile) ptx::wgmma_pin(output[tile]);
}

// P for one output tile from this warpgroup's own registers, [step][4].
using Probabilities = std::uint32_t[kPvSteps][4];

__device__ __forceinline__ void accumulate_own_p(OutputTile (&output)[kOutputTiles],
                                                 const Probabilities (&probabilities)[kOutputTiles],
                                                 const SmemPlan& smem, std::uint32_t stage, int warpgroup) {
  accumulate_pv(output, value_descriptor(smem, stage, warpgroup),
                [&](int tile, int step) -> const std::uint32_t(&)[4] { return probabilities[tile][step]; });
}

// P that the other warpgroup left in shared memory.
__device__ __forceinline__ void accumulate_peer_p(OutputTile (&output)[kOutputTiles], const SmemPlan& smem,
                                                  std::uint32_t stage, int warpgroup) {
  const std::uint64_t p[kOutputTiles] = {
      tile::descriptor(ptx::shared_address(smem.p), 0, tile::kAtomBytes),
      tile::descriptor(ptx::shared_address(smem.kv[stage][kRopePanel]), 0, tile::kAtomBytes)};
  accumulate_pv(output, value_descriptor(smem, stage, warpgroup),
                [&](int n, int step) { return tile::advance(p[n], step * kProbabilityStepUnits); });
}

}  // namespace chiasma::sm90_sparse_fp8
