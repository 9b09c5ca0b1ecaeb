// Stage score_qk: scores of one block before sm_scale, [64 tokens, heads], with rows as the left operand from
// registers.
//
// e4m3 is exact in f16, so nothing of K is rounded. With A_t the raw products of scale tile t, a token's score is
//   (A_0 s_0 / s_2 + A_2) s_2 + rope  +  (A_1 s_1 / s_3 + A_3) s_3
// in two chains of float32 accumulators: while the products of one run, the other is multiplied. RoPE values are
// multiplied as the bf16 that they are.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_register_a.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

// Operands of half a panel: two contraction steps.
inline constexpr int kStepsPerHalf = kStepsPerPanel / 2;
using HalfFragments = ptx::Fragment[kStepsPerHalf];
inline constexpr int kCodeHalves = 2 * kCodePanels;
inline constexpr int kRopeHalves = 2;
inline constexpr int kScoreSteps = kCodeHalves + kRopeHalves;

// A warp's 16 rows of a block, as ldmatrix takes them: lanes 8 m to 8 m + 7 point at rows 8 (m % 2) and on, chunk m
// / 2. A lane gets word lane % 4 of rows lane / 4 and + 8 of two neighbouring chunks: of codes that is what it needs
// for two contraction steps, of RoPE values for one.
struct RowReader {
  std::uint32_t address;

  __device__ RowReader(const RowBlock& block, int warp, int lane)
      : address(ptx::shared_address(&block.row[warp * kTokensPerWarp + lane % 16]) + lane / 16 * tile::kChunkBytes) {}

  __device__ uint4 load_codes(int half) const { return ptx::ldmatrix_x4(address + v32::kCodesOffset + half * 32); }
  __device__ uint4 load_rope(int step) const { return ptx::ldmatrix_x4(address + v32::kRopeOffset + step * 32); }
};

__device__ __forceinline__ void dequantize_half(HalfFragments& fragments, const uint4& raw) {
  ptx::e4m3x4_to_half2x2(raw.x, fragments[0][0], fragments[0][2]);
  ptx::e4m3x4_to_half2x2(raw.y, fragments[0][1], fragments[0][3]);
  ptx::e4m3x4_to_half2x2(raw.z, fragments[1][0], fragments[1][2]);
  ptx::e4m3x4_to_half2x2(raw.w, fragments[1][1], fragments[1][3]);
  ptx::fragment_pin(fragments[0]);
  ptx::fragment_pin(fragments[1]);
}

// RoPE values are operands as they are.
__device__ __forceinline__ void take_rope(ptx::Fragment& fragment, const uint4& raw) {
  fragment[0] = raw.x;
  fragment[1] = raw.y;
  fragment[2] = raw.z;
  fragment[3] = raw.w;
  ptx::fragment_pin(fragment);
}

template <ptx::Operand kType, int kHeads>
__device__ __forceinline__ void multiply_half(ptx::Accumulator<kHeads>& sums, const HalfFragments& fragments,
                                              std::uint64_t query, bool accumulate) {
  ptx::wgmma_pin(sums);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kStepsPerHalf; ++step) {
    // Descriptors count 16-byte units.
    ptx::wgmma_register_a<kType, ptx::RightLayout::k_major>(sums, fragments[step], query + step * 2,
                                                            accumulate || step > 0);
  }
  ptx::wgmma_commit();
}

// Multipliers of the chains, for a lane's two tokens.
using TokenFactors = float[2];

// Scales of tile `tile` of the lane's two tokens.
__device__ __forceinline__ void load_scales(TokenFactors& scales, const RowBlock& block, int tile, int warp, int lane) {
  const int row = warp * kTokensPerWarp + lane / 4;
  scales[0] = block.scale(row, tile);
  scales[1] = block.scale(row + 8, tile);
}

// Of tile `tile` to tile + 2.
__device__ __forceinline__ void load_ratios(TokenFactors& ratios, const BlockFactors& factors, int tile, int warp,
                                            int lane) {
  const int row = warp * kTokensPerWarp + lane / 4;
  ratios[0] = factors.ratio[tile][row];
  ratios[1] = factors.ratio[tile][row + 8];
}

template <int kHeads>
__device__ __forceinline__ void multiply_chain(ptx::Accumulator<kHeads>& chain, const TokenFactors& by) {
  ptx::wgmma_pin(chain);
#pragma unroll
  for (int i = 0; i < kHeads / 2; ++i) chain[i] *= by[i / 2 % 2];
}

// What is loaded of a block before its turn: its first halves.
inline constexpr int kHalvesAhead = 2;
// Halves whose products may be under way. With fewer the tensor cores wait for conversions.
inline constexpr int kHalvesInFlight = 3;
using RawHalves = uint4[kHalvesAhead];
static_assert(kHalvesAhead == kStepsPerHalf);

// between(step): called once the products of step `step` are issued; the first 16 are halves of code panels, the last
// two of the RoPE panel. Where a token's unit says that its scales need care its scores are worthless.
template <typename Config, typename Between>
__device__ __forceinline__ void score_qk(ptx::Accumulator<Config::kHeads>& scores, const SmemPlan<Config>& smem,
                                         std::uint32_t stage, RawHalves& raw, int warp, int lane, Between&& between) {
  constexpr int kHeads = Config::kHeads;
  const RowBlock& block = smem.rows[stage];
  const RowReader reader(block, warp, lane);
  const std::uint64_t query = tile::descriptor(ptx::shared_address(smem.q), 0, tile::kAtomBytes);
  constexpr int kPanelUnits = SmemPlan<Config>::kQueryPanelBytes / 16;
  constexpr int kHalfUnits = kStepsPerHalf * 2;
  constexpr int kHalvesPerScaleTile = 2 * kPanelsPerScaleTile;

  ptx::Accumulator<kHeads> second;
  HalfFragments fragments[kHalvesInFlight];
  TokenFactors factors;
#pragma unroll
  for (int step = 0; step < kScoreSteps; ++step) {
    const int panel = step / 2;
    const int half = step % 2;
    const int scale_tile = step / kHalvesPerScaleTile;
    const int step_in_tile = step % kHalvesPerScaleTile;
    // The products that read these registers last are done.
    if (step >= kHalvesInFlight) ptx::wgmma_wait<kHalvesInFlight - 1>();
    HalfFragments& own = fragments[step % kHalvesInFlight];
    const std::uint64_t query_half = query + panel * kPanelUnits + half * kHalfUnits;
    if (step < kCodeHalves) {
      dequantize_half(own, raw[half]);
      // Of RoPE every step of the contraction is a load of its own.
      raw[half] = step + kHalvesAhead < kCodeHalves ? reader.load_codes(step + kHalvesAhead)
                                                    : reader.load_rope(step + kHalvesAhead - kCodeHalves);
      multiply_half<ptx::Operand::f16, kHeads>(scale_tile % 2 == 0 ? scores : second, own, query_half,
                                               scale_tile >= 2 || step_in_tile > 0);
    } else {
#pragma unroll
      for (int i = 0; i < kStepsPerHalf; ++i) {
        take_rope(own[i], raw[i]);
        if (half == 0) raw[i] = reader.load_rope(kStepsPerHalf + i);
      }
      multiply_half<ptx::Operand::bf16, kHeads>(scores, own, query_half, true);
    }
    between(step);
    // What a chain is multiplied by is loaded a step before that; two steps into a tile the other chain's products
    // are all done.
    if (step_in_tile == 1) {
      if (scale_tile == 1) load_ratios(factors, smem.factors[stage], 0, warp, lane);
      if (scale_tile == 2) load_ratios(factors, smem.factors[stage], 1, warp, lane);
      if (scale_tile == 3) load_scales(factors, block, 2, warp, lane);
    }
    if (step_in_tile == 2) {
      if (scale_tile == 1 || scale_tile == 3) multiply_chain<kHeads>(scores, factors);
      if (scale_tile == 2) multiply_chain<kHeads>(second, factors);
    }
  }
  load_scales(factors, block, 3, warp, lane);
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(scores);
  ptx::wgmma_pin(second);
#pragma unroll
  for (int i = 0; i < kHeads / 2; ++i) scores[i] = fmaf(second[i], factors[i / 2 % 2], scores[i]);
}

// The same for any scales, a zero or a NaN among them: every tile's products are multiplied by their own scale. Seldom
// needed, so that it is short rather than fast. All scorer threads.
template <typename Config>
__device__ __forceinline__ void score_qk_carefully(ptx::Accumulator<Config::kHeads>& scores,
                                                   const SmemPlan<Config>& smem, const RowBlock& block, int warp,
                                                   int lane) {
  constexpr int kHeads = Config::kHeads;
  const RowReader reader(block, warp, lane);
  const std::uint64_t query = tile::descriptor(ptx::shared_address(smem.q), 0, tile::kAtomBytes);
  constexpr int kPanelUnits = SmemPlan<Config>::kQueryPanelBytes / 16;
  constexpr int kHalfUnits = kStepsPerHalf * 2;
  ptx::Accumulator<kHeads> products;
  HalfFragments fragments;
#pragma unroll
  for (int half = 0; half < kRopeHalves; ++half) {
#pragma unroll
    for (int i = 0; i < kStepsPerHalf; ++i) take_rope(fragments[i], reader.load_rope(half * kStepsPerHalf + i));
    multiply_half<ptx::Operand::bf16, kHeads>(scores, fragments, query + kRopePanel * kPanelUnits + half * kHalfUnits,
                                              half > 0);
    ptx::wgmma_wait<0>();
  }
  ptx::wgmma_pin(scores);
#pragma unroll 1
  for (int step = 0; step < kCodeHalves; ++step) {
    dequantize_half(fragments, reader.load_codes(step));
    multiply_half<ptx::Operand::f16, kHeads>(products, fragments,
                                             query + step / 2 * kPanelUnits + step % 2 * kHalfUnits, false);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(products);
    TokenFactors scales;
    load_scales(scales, block, step / (2 * kPanelsPerScaleTile), warp, lane);
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) scores[i] = fmaf(products[i], scales[i / 2 % 2], scores[i]);
  }
}

}  // namespace chiasma::sm90_sparse_fp8_direct
