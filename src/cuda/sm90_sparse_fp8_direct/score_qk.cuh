// Stage score_qk: scores of one block before sm_scale, [64 tokens, heads], with rows as the left operand from
// registers.
//
// e4m3 is exact in f16, so nothing of K is rounded. With A_t the raw products of scale tile t, a token's score is
//   (((A_0 s_0 / s_1 + A_1) s_1 / s_2 + A_2) s_2 / s_3 + A_3) s_3 + rope
// in one set of float32 accumulators, multiplied where a tile ends; the other math warpgroup has the tensor cores while
// this one multiplies. RoPE values are multiplied as the bf16 that they are.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_register_a.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

// Contraction steps: of codes, then of RoPE values.
inline constexpr int kCodeSteps = kCodePanels * kStepsPerPanel;
inline constexpr int kScoreSteps = kKeyPanels * kStepsPerPanel;
inline constexpr int kStepsPerScaleTile = kPanelsPerScaleTile * kStepsPerPanel;

// A warp's 16 rows of a block, as ldmatrix takes them: lanes 8 m to 8 m + 7 point at rows 8 (m % 2) and on, chunk m
// / 2. A lane gets word lane % 4 of rows lane / 4 and + 8 of two neighbouring chunks: of codes that is what it needs
// for two contraction steps, of RoPE values for one.
struct RowReader {
  std::uint32_t address;

  __device__ RowReader(const RowBlock& block, int warp, int lane)
      : address(ptx::shared_address(&block.row[warp * kTokensPerWarp + lane % 16]) + lane / 16 * tile::kChunkBytes) {}

  // Two code steps, from an even one on, or one of RoPE.
  __device__ uint4 load(int step) const {
    return ptx::ldmatrix_x4(
        address + (step < kCodeSteps ? v32::kCodesOffset + step * 16 : v32::kRopeOffset + (step - kCodeSteps) * 32));
  }
};

// Operand of a step from what was loaded for it: codes become f16, RoPE values are operands as they are.
__device__ __forceinline__ void take_step(ptx::Fragment& fragment, const uint4& raw, int step) {
  if (step >= kCodeSteps) {
    fragment[0] = raw.x;
    fragment[1] = raw.y;
    fragment[2] = raw.z;
    fragment[3] = raw.w;
  } else {
    ptx::e4m3x4_to_half2x2(step % 2 == 0 ? raw.x : raw.z, fragment[0], fragment[2]);
    ptx::e4m3x4_to_half2x2(step % 2 == 0 ? raw.y : raw.w, fragment[1], fragment[3]);
  }
  ptx::fragment_pin(fragment);
}

// Descriptor of the query's columns of a step.
template <typename Config>
__device__ __forceinline__ std::uint64_t query_step(std::uint64_t query, int step) {
  constexpr int kPanelUnits = SmemPlan<Config>::kQueryPanelBytes / tile::kChunkBytes;
  return tile::advance(query, step / kStepsPerPanel * kPanelUnits + step % kStepsPerPanel * 2);
}

// Multipliers of sums, for a lane's two tokens.
using TokenFactors = float[2];

// Scales of tile `tile` of the lane's two tokens.
__device__ __forceinline__ void load_scales(TokenFactors& scales, const RowBlock& block, int tile, int warp, int lane) {
  const int row = warp * kTokensPerWarp + lane / 4;
  scales[0] = block.scale(row, tile);
  scales[1] = block.scale(row + 8, tile);
}

// Of tile `tile` to the next one.
__device__ __forceinline__ void load_ratios(TokenFactors& ratios, const ScoreFactors& factors, int tile, int warp,
                                            int lane) {
  const int row = warp * kTokensPerWarp + lane / 4;
  ratios[0] = factors.ratio[tile][row];
  ratios[1] = factors.ratio[tile][row + 8];
}

template <int kHeads>
__device__ __forceinline__ void multiply_sums(ptx::Accumulator<kHeads>& sums, const TokenFactors& by) {
  ptx::wgmma_pin(sums);
#pragma unroll
  for (int i = 0; i < kHeads / 2; ++i) sums[i] *= by[i / 2 % 2];
}

// Two contraction steps at a time: their operands in one set of registers, their products in one group.
inline constexpr int kPairSteps = 2;
inline constexpr int kScorePairs = kScoreSteps / kPairSteps;
inline constexpr int kCodePairs = kCodeSteps / kPairSteps;
inline constexpr int kPairsPerScaleTile = kStepsPerScaleTile / kPairSteps;
using PairFragments = ptx::Fragment[kPairSteps];

// What is loaded ahead: the codes of the next pair and the one after that, or the two steps of a RoPE pair.
using RawPairs = uint4[2];

// Operands of a pair, and the loads that its registers are free for.
__device__ __forceinline__ void take_pair(PairFragments& fragments, RawPairs& raw, const RowReader& reader, int pair) {
  const int step = pair * kPairSteps;
  if (pair < kCodePairs) {
    take_step(fragments[0], raw[pair % 2], step);
    take_step(fragments[1], raw[pair % 2], step + 1);
    // The last two code pairs make room for the two steps of the first RoPE pair.
    raw[pair % 2] = reader.load(pair + 2 < kCodePairs ? step + 2 * kPairSteps : kCodeSteps + pair % 2);
  } else {
#pragma unroll
    for (int i = 0; i < kPairSteps; ++i) {
      take_step(fragments[i], raw[i], step + i);
      if (pair + 1 < kScorePairs) raw[i] = reader.load(step + kPairSteps + i);
    }
  }
}

// between(pair): called once the products of a pair are issued. Where a token's unit says that it needs care its
// scores are worthless.
template <typename Config, typename Between>
__device__ __forceinline__ void score_qk(ptx::Accumulator<Config::kHeads>& scores, std::uint32_t query_panels,
                                         const RowBlock& block, const ScoreFactors& score_factors, int warp, int lane,
                                         Between&& between) {
  const RowReader reader(block, warp, lane);
  const std::uint64_t query = tile::descriptor(query_panels, 0, tile::kAtomBytes);
  RawPairs raw = {reader.load(0), reader.load(kPairSteps)};
  PairFragments fragments[2];
  TokenFactors factors;
  take_pair(fragments[0], raw, reader, 0);
#pragma unroll
  for (int pair = 0; pair < kScorePairs; ++pair) {
    if (pair > 0 && pair % kPairsPerScaleTile == 0) {
      ptx::wgmma_wait<0>();
      multiply_sums<Config::kHeads>(scores, factors);
    }
    ptx::wgmma_pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPairSteps; ++i) {
      const int step = pair * kPairSteps + i;
      const std::uint64_t columns = query_step<Config>(query, step);
      const ptx::Fragment& own = fragments[pair % 2][i];
      if (step < kCodeSteps) {
        ptx::wgmma_register_a<ptx::Operand::f16, ptx::RightLayout::k_major>(scores, own, columns, step > 0);
      } else {
        ptx::wgmma_register_a<ptx::Operand::bf16, ptx::RightLayout::k_major>(scores, own, columns, true);
      }
    }
    ptx::wgmma_commit();
    between(pair);
    // What sums are multiplied by is loaded two pairs before that.
    if (pair % kPairsPerScaleTile == kPairsPerScaleTile - 2 && pair < kCodePairs) {
      const int scale_tile = pair / kPairsPerScaleTile;
      if (scale_tile + 1 < v32::kNumTiles) {
        load_ratios(factors, score_factors, scale_tile, warp, lane);
      } else {
        load_scales(factors, block, scale_tile, warp, lane);
      }
    }
    if (pair + 1 == kScorePairs) break;
    // The products that read these registers last are done.
    if (pair > 0) ptx::wgmma_wait<1>();
    take_pair(fragments[(pair + 1) % 2], raw, reader, pair + 1);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(scores);
}

// The same for any scales, a zero or a NaN among them: every tile's products are multiplied by their own scale. Seldom
// needed, so that it is short rather than fast. All scorer threads.
template <typename Config>
__device__ __forceinline__ void score_qk_carefully(ptx::Accumulator<Config::kHeads>& scores, std::uint32_t query_panels,
                                                   const RowBlock& block, int warp, int lane) {
  constexpr int kHeads = Config::kHeads;
  // Few heads at a time, since all other registers are in use.
  constexpr int kSlice = kHeads < 16 ? kHeads : 16;
  const RowReader reader(block, warp, lane);
  const std::uint64_t query = tile::descriptor(query_panels, 0, tile::kAtomBytes);
  ptx::Fragment fragment;
#pragma unroll
  for (float& score : scores) score = 0.0f;
#pragma unroll
  for (int step = kCodeSteps; step < kScoreSteps; ++step) {
    take_step(fragment, reader.load(step), step);
    ptx::wgmma_pin(scores);
    ptx::wgmma_fence();
    ptx::wgmma_register_a<ptx::Operand::bf16, ptx::RightLayout::k_major>(scores, fragment,
                                                                         query_step<Config>(query, step), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  ptx::wgmma_pin(scores);
#pragma unroll 1
  for (int pair = 0; pair < kCodeSteps; pair += 2) {
    const uint4 raw = reader.load(pair);
    TokenFactors scales;
    load_scales(scales, block, pair / kStepsPerScaleTile, warp, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      take_step(fragment, raw, half);
#pragma unroll
      for (int slice = 0; slice < kHeads / kSlice; ++slice) {
        constexpr int kSliceUnits = kSlice * tile::kPanelRowBytes / tile::kChunkBytes;
        ptx::Accumulator<kSlice> products;
        ptx::wgmma_fence();
        ptx::wgmma_register_a<ptx::Operand::f16, ptx::RightLayout::k_major>(
            products, fragment, tile::advance(query_step<Config>(query, pair + half), slice * kSliceUnits), false);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(products);
#pragma unroll
        for (int i = 0; i < kSlice / 2; ++i) {
          float& score = scores[slice * kSlice / 2 + i];
          score = fmaf(products[i], scales[i / 2 % 2], score);
        }
      }
    }
  }
}

}  // namespace chiasma::sm90_sparse_fp8_direct
