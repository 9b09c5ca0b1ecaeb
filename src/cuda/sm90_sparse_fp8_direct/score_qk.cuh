// Stage score_qk: scores of one block before sm_scale, [64 tokens, heads], with rows as the left operand from
// registers.
//
// e4m3 is exact in f16, so nothing of K is rounded. Scales that are any float32: with A_t the raw products of scale
// tile t, a token's score is
//   (((A_0 s_0 / s_1 + A_1) s_1 / s_2 + A_2) s_2 / s_3 + A_3) s_3 + bf16 columns
// in one set of float32 accumulators, multiplied where a tile ends; the other math warpgroup has the tensor cores while
// this one multiplies. Scales that are powers of two multiply codes as they become operands. bf16 values are multiplied
// as they are.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_register_a.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

// Contraction steps: of codes, then of bf16 values.
template <typename Config>
inline constexpr int kCodeSteps = Config::kCodePanels* kStepsPerPanel;
template <typename Config>
inline constexpr int kScoreSteps = Config::kKeyPanels* kStepsPerPanel;

// A warp's 16 rows of a block, as ldmatrix takes them: lanes 8 m to 8 m + 7 point at rows 8 (m % 2) and on, chunk m
// / 2. A lane gets word lane % 4 of rows lane / 4 and + 8 of two neighbouring chunks: of codes that is what it needs
// for two contraction steps, of bf16 values for one.
template <typename Config>
struct RowReader {
  std::uint32_t address;

  __device__ RowReader(const RowBlock<Config>& block, int warp, int lane)
      : address(ptx::shared_address(&block.row[warp * kTokensPerWarp + lane % 16]) + lane / 16 * tile::kChunkBytes) {}

  // Two code steps, from an even one on, or one of bf16 values.
  __device__ uint4 load(int step) const {
    constexpr int kCodes = kCodeSteps<Config>;
    return ptx::ldmatrix_x4(address + (step < kCodes ? step * 16 : Config::kTraits.bf16_offset + (step - kCodes) * 32));
  }
};

// Operand of a step from what was loaded for it: codes become f16, bf16 values are operands as they are.
__device__ __forceinline__ void take_codes(ptx::Fragment& fragment, const uint4& raw, int step) {
  ptx::e4m3x4_to_half2x2(step % 2 == 0 ? raw.x : raw.z, fragment[0], fragment[2]);
  ptx::e4m3x4_to_half2x2(step % 2 == 0 ? raw.y : raw.w, fragment[1], fragment[3]);
}
__device__ __forceinline__ void take_bf16(ptx::Fragment& fragment, const uint4& raw) {
  fragment[0] = raw.x;
  fragment[1] = raw.y;
  fragment[2] = raw.z;
  fragment[3] = raw.w;
  ptx::fragment_pin(fragment);
}

// Scales that are powers of two, of a lane's two tokens, each as two equal f16: what codes are multiplied by.
template <typename Config>
class OperandScales {
 public:
  __device__ OperandScales(const RowBlock<Config>& block, int warp, int lane)
      : block_(block), token_(warp * kTokensPerWarp + lane / 4) {}

  // Tiles in order. Four exponents are loaded at once.
  __device__ void take_tile(int tile) {
    if (tile % 4 == 0) {
      exponents_[0] = block_.exponents(token_, tile);
      exponents_[1] = block_.exponents(token_ + 8, tile);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // PERF: two instructions, where a conversion from float32 would take four (kLeastPlainExponent sees to it that
      // the exponent fits f16).
      constexpr std::uint32_t kBothHalves = 0x04000400;
      constexpr std::uint32_t kBiasDifference = 127 - 15;
      const std::uint32_t exponent = __byte_perm(exponents_[i], 0, 0x4440 + tile % 4);
      scale_[i] = exponent * kBothHalves - kBiasDifference * kBothHalves;
    }
  }
  __device__ void multiply(ptx::Fragment& fragment) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = ptx::multiply_half2(fragment[i], scale_[i % 2]);
  }

 private:
  const RowBlock<Config>& block_;
  int token_;
  std::uint32_t exponents_[2];
  std::uint32_t scale_[2];
};

// Descriptor of the query's columns of a step.
template <typename Config>
__device__ __forceinline__ std::uint64_t query_step(std::uint64_t query, int step) {
  constexpr int kPanelUnits = SmemPlan<Config>::kQueryPanelBytes / tile::kChunkBytes;
  return tile::advance(query, step / kStepsPerPanel * kPanelUnits + step % kStepsPerPanel * 2);
}

// Multipliers of sums, for a lane's two tokens.
using TokenFactors = float[2];

// Scales of tile `tile` of the lane's two tokens.
template <typename Config>
__device__ __forceinline__ void load_scales(TokenFactors& scales, const RowBlock<Config>& block, int tile, int warp,
                                            int lane) {
  const int row = warp * kTokensPerWarp + lane / 4;
  scales[0] = block.scale(row, tile);
  scales[1] = block.scale(row + 8, tile);
}

// Of tile `tile` to the next one.
template <typename Config>
__device__ __forceinline__ void load_ratios(TokenFactors& ratios, const ScoreFactors<Config>& factors, int tile,
                                            int warp, int lane) {
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
template <typename Config>
inline constexpr int kScorePairs = kScoreSteps<Config> / kPairSteps;
template <typename Config>
inline constexpr int kCodePairs = kCodeSteps<Config> / kPairSteps;
template <typename Config>
inline constexpr int kPairsPerScaleTile = Config::kTraits.scale_columns / (16 * kPairSteps);
using PairFragments = ptx::Fragment[kPairSteps];

// What is loaded ahead: the codes of the next pair and the one after that, or the two steps of a bf16 pair.
using RawPairs = uint4[2];

// Operands of a pair, and the loads that its registers are free for.
template <typename Config>
__device__ __forceinline__ void take_pair(PairFragments& fragments, RawPairs& raw, const RowReader<Config>& reader,
                                          OperandScales<Config>& scales, int pair) {
  static_assert(Config::kBf16Panels == 0 || kCodePairs<Config> % 2 == 0, "raw[0] has the first bf16 step");
  const int step = pair * kPairSteps;
  if (pair < kCodePairs<Config>) {
#pragma unroll
    for (int i = 0; i < kPairSteps; ++i) take_codes(fragments[i], raw[pair % 2], i);
    if constexpr (Config::kScaling == Scaling::operands) {
      if (pair % kPairsPerScaleTile<Config> == 0) scales.take_tile(pair / kPairsPerScaleTile<Config>);
#pragma unroll
      for (int i = 0; i < kPairSteps; ++i) scales.multiply(fragments[i]);
    }
#pragma unroll
    for (int i = 0; i < kPairSteps; ++i) ptx::fragment_pin(fragments[i]);
    // The last two code pairs make room for the two steps of the first bf16 pair.
    if (pair + 2 < kCodePairs<Config>) {
      raw[pair % 2] = reader.load(step + 2 * kPairSteps);
    } else if (Config::kBf16Panels > 0) {
      raw[pair % 2] = reader.load(kCodeSteps<Config> + (pair + 2 - kCodePairs<Config>));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPairSteps; ++i) {
      take_bf16(fragments[i], raw[i]);
      if (pair + 1 < kScorePairs<Config>) raw[i] = reader.load(step + kPairSteps + i);
    }
  }
}

// between(pair): called once the products of a pair are issued. Where a token's unit says that it needs care its
// scores are worthless.
template <typename Config, typename Between>
__device__ __forceinline__ void score_qk(ptx::Accumulator<Config::kHeads>& scores, std::uint32_t query_panels,
                                         const RowBlock<Config>& block, const ScoreFactors<Config>& score_factors,
                                         int warp, int lane, Between&& between) {
  constexpr bool kHasRatios = Config::kScaling == Scaling::ratios;
  const RowReader<Config> reader(block, warp, lane);
  const std::uint64_t query = tile::descriptor(query_panels, 0, tile::kAtomBytes);
  RawPairs raw = {reader.load(0), reader.load(Config::kIsBf16 ? 1 : kPairSteps)};
  OperandScales<Config> operand_scales(block, warp, lane);
  PairFragments fragments[2];
  TokenFactors factors;
  take_pair<Config>(fragments[0], raw, reader, operand_scales, 0);
#pragma unroll
  for (int pair = 0; pair < kScorePairs<Config>; ++pair) {
    if constexpr (kHasRatios) {
      if (pair > 0 && pair % kPairsPerScaleTile<Config> == 0) {
        ptx::wgmma_wait<0>();
        multiply_sums<Config::kHeads>(scores, factors);
      }
    }
    ptx::wgmma_pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPairSteps; ++i) {
      const int step = pair * kPairSteps + i;
      const std::uint64_t columns = query_step<Config>(query, step);
      const ptx::Fragment& own = fragments[pair % 2][i];
      if (step < kCodeSteps<Config>) {
        ptx::wgmma_register_a<ptx::Operand::f16, ptx::RightLayout::k_major>(scores, own, columns, step > 0);
      } else {
        ptx::wgmma_register_a<ptx::Operand::bf16, ptx::RightLayout::k_major>(scores, own, columns, step > 0);
      }
    }
    ptx::wgmma_commit();
    between(pair);
    if constexpr (kHasRatios) {
      // What sums are multiplied by is loaded two pairs before that.
      if (pair % kPairsPerScaleTile<Config> == kPairsPerScaleTile<Config> - 2 && pair < kCodePairs<Config>) {
        const int scale_tile = pair / kPairsPerScaleTile<Config>;
        if (scale_tile + 1 < Config::kTraits.num_scales()) {
          load_ratios<Config>(factors, score_factors, scale_tile, warp, lane);
        } else {
          load_scales<Config>(factors, block, scale_tile, warp, lane);
        }
      }
    }
    if (pair + 1 == kScorePairs<Config>) break;
    // The products that read these registers last are done.
    if (pair > 0) ptx::wgmma_wait<1>();
    take_pair<Config>(fragments[(pair + 1) % 2], raw, reader, operand_scales, pair + 1);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(scores);
  // Without bf16 columns the last tile ends here.
  if constexpr (kHasRatios && Config::kBf16Panels == 0) multiply_sums<Config::kHeads>(scores, factors);
}

// The same for any scales, a zero or a NaN among them: every tile's products are multiplied by their own scale. Seldom
// needed, so that it is short rather than fast. All scorer threads.
template <typename Config>
__device__ __forceinline__ void score_qk_carefully(ptx::Accumulator<Config::kHeads>& scores, std::uint32_t query_panels,
                                                   const RowBlock<Config>& block, int warp, int lane) {
  constexpr int kHeads = Config::kHeads;
  // Few heads at a time, since all other registers are in use.
  constexpr int kSlice = kHeads < 16 ? kHeads : 16;
  const RowReader<Config> reader(block, warp, lane);
  const std::uint64_t query = tile::descriptor(query_panels, 0, tile::kAtomBytes);
  ptx::Fragment fragment;
#pragma unroll
  for (float& score : scores) score = 0.0f;
#pragma unroll
  for (int step = kCodeSteps<Config>; step < kScoreSteps<Config>; ++step) {
    take_bf16(fragment, reader.load(step));
    ptx::wgmma_pin(scores);
    ptx::wgmma_fence();
    ptx::wgmma_register_a<ptx::Operand::bf16, ptx::RightLayout::k_major>(scores, fragment,
                                                                         query_step<Config>(query, step), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  ptx::wgmma_pin(scores);
#pragma unroll 1
  for (int step = 0; step < kCodeSteps<Config>; step += 2) {
    const uint4 raw = reader.load(step);
    TokenFactors scales;
    load_scales<Config>(scales, block, step * 16 / Config::kTraits.scale_columns, warp, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      take_codes(fragment, raw, half);
      ptx::fragment_pin(fragment);
#pragma unroll
      for (int slice = 0; slice < kHeads / kSlice; ++slice) {
        constexpr int kSliceUnits = kSlice * tile::kPanelRowBytes / tile::kChunkBytes;
        ptx::Accumulator<kSlice> products;
        ptx::wgmma_fence();
        ptx::wgmma_register_a<ptx::Operand::f16, ptx::RightLayout::k_major>(
            products, fragment, tile::advance(query_step<Config>(query, step + half), slice * kSliceUnits), false);
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
