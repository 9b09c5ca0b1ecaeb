// Stage accumulate_pv: output columns of one accumulator, [256 columns, heads], += V^T P, with V^T as the left operand
// from registers.
//
// LAYOUT: warp w of an accumulator owns 64 consecutive columns, lane l eight of them, 8 (l / 4). Accumulator tile i has
// columns 2 i and 2 i + 1 of each eight as its rows l / 4 and l / 4 + 8, so a lane's results are eight neighbours.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90_sparse_fp8_direct/score_qk.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

template <int kHeads>
using OutputTiles = ptx::Accumulator<kHeads>[kValueTiles];

inline constexpr int kPvSteps = kBlockTokens / 16;
inline constexpr int kFragmentsInFlight = 2;

// Eight codes of four tokens: 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a contraction step, t = lane % 4.
struct RawValues {
  uint2 token[4];
};

__device__ __forceinline__ uint2 load_shared_8(std::uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
  return value;
}

// Where a lane's columns lie in the rows of a block.
struct ColumnReader {
  std::uint32_t address;  // shared, for the lane's token 2 t of the first step

  __device__ ColumnReader(const RowBlock& block, int accumulator, int warp, int lane)
      : address(ptx::shared_address(&block.row[lane % 4 * 2][v32::kCodesOffset]) +
                accumulator * kColumnsPerAccumulator + warp * kColumnsPerWarp + lane / 4 * kColumnsPerThread) {}

  __device__ void load(RawValues& raw, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = step * 16 + i / 2 * 8 + i % 2;
      raw.token[i] = load_shared_8(address + token * v32::kRowBytes);
    }
  }
};

__device__ __forceinline__ std::uint32_t scaled_half2(std::uint32_t values, std::uint32_t scales) {
  const __half2 product =
      __hmul2(*reinterpret_cast<const __half2*>(&values), *reinterpret_cast<const __half2*>(&scales));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}

// Operand of tile i: columns 2 i, 2 i + 1 of two pairs of tokens, times the tokens' scales.
__device__ __forceinline__ void dequantize_values(ptx::Fragment& fragment, const RawValues& raw, int tile,
                                                  const std::uint32_t (&scales)[2]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint2& first = raw.token[2 * pair];
    const uint2& second = raw.token[2 * pair + 1];
    const std::uint32_t interleaved =
        __byte_perm(tile < 2 ? first.x : first.y, tile < 2 ? second.x : second.y, tile % 2 == 0 ? 0x5140 : 0x7362);
    std::uint32_t even, odd;
    ptx::e4m3x4_to_half2x2(interleaved, even, odd);
    fragment[2 * pair] = scaled_half2(even, scales[pair]);
    fragment[2 * pair + 1] = scaled_half2(odd, scales[pair]);
  }
  ptx::fragment_pin(fragment);
}

__device__ __forceinline__ void values_pin(RawValues& raw) {
#pragma unroll
  for (uint2& token : raw.token) asm volatile("" : "+r"(token.x), "+r"(token.y)::"memory");
}

// after_step(step): called when nothing will read the 16 rows of contraction step `step` any more.
template <typename Config, typename AfterStep>
__device__ __forceinline__ void accumulate_pv(OutputTiles<Config::kHeads>& output, const Probabilities& probabilities,
                                              const RowBlock& block, const ValueScales& value_scales, int accumulator,
                                              int warp, int lane, AfterStep&& after_step) {
  constexpr int kWarpsPerScaleTile = v32::kTileDim / kColumnsPerWarp;
  constexpr int kTilesPerAccumulator = kColumnsPerAccumulator / v32::kTileDim;
  const ColumnReader reader(block, accumulator, warp, lane);
  const int scale_tile = accumulator * kTilesPerAccumulator + warp / kWarpsPerScaleTile;
  const auto* scale_pairs = reinterpret_cast<const std::uint32_t*>(value_scales[scale_tile]) + lane % 4;
  const std::uint64_t p = tile::descriptor(ptx::shared_address(&probabilities), 0, tile::kAtomBytes);
  constexpr int kStepUnits = 16 * tile::kPanelRowBytes / 16;

  RawValues raw;
  reader.load(raw, 0);
  ptx::Fragment fragments[kFragmentsInFlight];
#pragma unroll
  for (int i = 0; i < kValueTiles; ++i) ptx::wgmma_pin(output[i]);
#pragma unroll
  for (int step = 0; step < kPvSteps; ++step) {
    const std::uint32_t scales[2] = {scale_pairs[step * 8], scale_pairs[step * 8 + 4]};
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      const int product = step * kValueTiles + i;
      ptx::Fragment& fragment = fragments[product % kFragmentsInFlight];
      // One group a product: an operand's registers are free once the product that read them last is done.
      if (product >= kFragmentsInFlight) ptx::wgmma_wait<kFragmentsInFlight - 1>();
      values_pin(raw);
      dequantize_values(fragment, raw, i, scales);
      if (i == kValueTiles - 1 && step + 1 < kPvSteps) reader.load(raw, step + 1);
      ptx::wgmma_fence();
      ptx::wgmma_register_a<ptx::Operand::f16, ptx::RightLayout::mn_major>(output[i], fragment, p + step * kStepUnits,
                                                                           true);
      ptx::wgmma_commit();
      // The rows are in registers when the last operand of the step is, and all lanes of the warp are past that here.
      if (i == kValueTiles - 1) after_step(step);
    }
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kValueTiles; ++i) ptx::wgmma_pin(output[i]);
}

}  // namespace chiasma::sm90_sparse_fp8_direct
