// Stage dequantize_kv: gathered rows to an f16 tile in shared memory, and their scales beside it. Codes become f16 as
// they are, which is exact; RoPE values are divided by a power of two.
#pragma once

#include <cuda_fp16.h>

#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/sm90_sparse_fp8/gather_kv.cuh"
#include "cuda/sm90_sparse_fp8/smem_plan.h"
#include "cuda/tile/bf16_words.cuh"

namespace chiasma::sm90_sparse_fp8 {

// Where a warp's four rows go: half an atom of every panel of a stage.
struct TileTarget {
  std::uint32_t rows;    // shared address of the warp's first row in the stage's first panel
  std::uint32_t scales;  // shared address of the rows' scales
};

__device__ __forceinline__ void store_chunk(std::uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_word(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Powers of two taken out of a lane's row, as biased float32 exponents.
struct RowExponents {
  std::uint32_t unit;         // of the largest scale
  std::uint32_t rope_factor;  // at least unit - kRopeUnitExponent
};

// Scales and their inverses are normal numbers within these bounds.
inline constexpr std::uint32_t kLeastUnitExponent = 31;
inline constexpr std::uint32_t kMostUnitExponent = 253;
// Of rope_factor over unit, so that their quotient is a normal number.
inline constexpr std::uint32_t kMostExponentDistance = 100;

inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;

__device__ __forceinline__ std::uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}
__device__ __forceinline__ std::uint32_t largest_scale_bits(const float4& scales) {
  return max(max(magnitude_bits(scales.x), magnitude_bits(scales.y)),
             max(magnitude_bits(scales.z), magnitude_bits(scales.w)));
}

// Whether all scales of the warp's rows are finite numbers. Others go into the codes.
__device__ __forceinline__ bool all_finite(const GatheredRows& rows) {
  return __all_sync(0xffffffffu, largest_scale_bits(rows.scales) < kInfinityBits);
}

// Seldom: RoPE values beyond the reach of the scales.
__device__ __noinline__ RowExponents reach_rope(RowExponents exponents, std::uint32_t rope_needs) {
#pragma unroll
  for (int step = 1; step < kLanesPerRow; step *= 2) {
    rope_needs = max(rope_needs, __shfl_xor_sync(0xffffffffu, rope_needs, step));
  }
  exponents.rope_factor = max(exponents.rope_factor + kRopeTargetExponent, rope_needs) - kRopeTargetExponent;
  exponents.unit = max(exponents.unit + kMostExponentDistance, exponents.rope_factor) - kMostExponentDistance;
  return exponents;
}

__device__ __forceinline__ RowExponents find_exponents(const float4& finite_scales, const uint4& rope) {
  RowExponents exponents;
  exponents.unit = min(max(largest_scale_bits(finite_scales) >> 23, kLeastUnitExponent), kMostUnitExponent);
  exponents.rope_factor = exponents.unit - kRopeUnitExponent;
  const std::uint32_t rope_needs = tile::larger_half(tile::packed_magnitude(rope)) >> 7;
  if (__any_sync(0xffffffffu, rope_needs > exponents.rope_factor + kRopeTargetExponent)) {
    exponents = reach_rope(exponents, rope_needs);
  }
  return exponents;
}

// A scale over the row's unit. A ratio needs two numbers of not too different size; 2^-50 of the largest is nothing.
__device__ __forceinline__ float relative_scale(float scale, float inverse_unit) {
  const float relative = scale * inverse_unit;
  return copysignf(fmaxf(fabsf(relative), 0x1p-50f), relative);
}

// Writes StoredScales: the ratios by the first lanes of a row, the exponents by the next.
__device__ __forceinline__ void store_scales(const float4& s, bool valid, const RowExponents& exponents,
                                             const TileTarget& target, int lane) {
  const int row = lane / kLanesPerRow;
  const int tile = lane % kLanesPerRow;
  const float inverse_unit = __uint_as_float((254u - exponents.unit) << 23);
  const float scale = relative_scale(tile < 2 ? (tile == 0 ? s.x : s.y) : (tile == 2 ? s.z : s.w), inverse_unit);
  float next = relative_scale(tile == 0 ? s.y : tile == 1 ? s.z : s.w, inverse_unit);
  if (tile == kScaleTiles - 1) next = __uint_as_float((127u + exponents.rope_factor - exponents.unit) << 23);
  const float log2_unit = valid ? static_cast<float>(static_cast<int>(exponents.unit) - 127) : -INFINITY;
  const std::uint32_t ratio = __float_as_uint(scale * ptx::reciprocal_approx(next));
  const std::uint32_t packed_exponents = __float_as_uint(log2_unit) | exponents.rope_factor << 7;
  static_assert(offsetof(StoredScales, exponents) == kScaleTiles * sizeof(StoredScales::ratio[0]));
  if (tile <= kScaleTiles) {
    store_word(target.scales + (tile * kGroupTokens + row) * sizeof(float),
               tile < kScaleTiles ? ratio : packed_exponents);
  }
}

__device__ __forceinline__ void dequantize_rope(const uint4& rope, const RowExponents& exponents,
                                                const TileTarget& target, int first_row_in_atom, int lane) {
  const int row = lane / kLanesPerRow;
  const int chunk = lane % kLanesPerRow ^ (first_row_in_atom + row);
  store_chunk(target.rows + kRopePanel * kPanelBytes + row * tile::kPanelRowBytes + chunk * tile::kChunkBytes,
              tile::scaled_half8(rope, __uint_as_float((254u - exponents.rope_factor) << 23)));
}

// Seldom: scales that are no finite numbers go into the codes. They are replaced by the largest other's power of two;
// the result has two bits a tile, 0 for a finite scale, else which of these it was.
__device__ __forceinline__ std::uint32_t take_out_spoilt(float4& scales) {
  float* const each[kScaleTiles] = {&scales.x, &scales.y, &scales.z, &scales.w};
  std::uint32_t most = kLeastUnitExponent << 23;
#pragma unroll
  for (const float* scale : each)
    most = max(most, magnitude_bits(*scale) < kInfinityBits ? magnitude_bits(*scale) : 0u);
  std::uint32_t kinds = 0;
#pragma unroll
  for (int tile = 0; tile < kScaleTiles; ++tile) {
    float& scale = *each[tile];
    if (magnitude_bits(scale) < kInfinityBits) continue;
    kinds |= (isnan(scale) ? 3u : scale > 0.0f ? 1u : 2u) << (2 * tile);
    scale = __uint_as_float(most & kInfinityBits);
  }
  return kinds;
}

// Address of a lane's chunk l % 8 of panel l / 8 of a half, for the warp's row 0. The swizzle is an exclusive or of the
// chunk's bits with the row's number, and panels are aligned, so that row i is `^ i * 16` and `+ i * 128` away.
__device__ __forceinline__ std::uint32_t chunk_address(const TileTarget& target, int half, int first_row_in_atom,
                                                       int lane) {
  return target.rows + (half * kHalfPanels + lane / 8) * kPanelBytes +
         (lane % 8 ^ first_row_in_atom) * tile::kChunkBytes;
}
__device__ __forceinline__ std::uint32_t row_of_chunk(std::uint32_t first_chunk, int row) {
  return (first_chunk ^ (row * tile::kChunkBytes)) + row * tile::kPanelRowBytes;
}

// Multiplies what a lane has just stored by what take_out_spoilt() took out.
__device__ __noinline__ void spoil_half(std::uint32_t kinds, std::uint32_t first_chunk, int half, int lane) {
  const int tile = half * (kScaleTiles / kHalves) + lane / (kWarpThreads / 2);
  for (int row = 0; row < kRowsPerWarp; ++row) {
    const std::uint32_t kind = __shfl_sync(0xffffffffu, kinds, row * kLanesPerRow) >> (tile * 2) & 3u;
    if (kind == 0) continue;
    const __half2 factor = __float2half2_rn(kind == 3 ? NAN : kind == 1 ? INFINITY : -INFINITY);
    auto* values = static_cast<__half2*>(__cvta_shared_to_generic(row_of_chunk(first_chunk, row)));
    for (int i = 0; i < tile::kChunkColumns / 2; ++i) values[i] = __hmul2(values[i], factor);
  }
}

template <int kHalf>
__device__ __forceinline__ void dequantize_half(const GatheredRows& rows, std::uint32_t spoilt,
                                                const TileTarget& target, int first_row_in_atom, int lane) {
  const std::uint32_t first_chunk = chunk_address(target, kHalf, first_row_in_atom, lane);
#pragma unroll
  for (int row = 0; row < kRowsPerWarp; ++row) {
    uint4 chunk;
    ptx::e4m3x4_to_half2x2(rows.codes[row][kHalf].x, chunk.x, chunk.y);
    ptx::e4m3x4_to_half2x2(rows.codes[row][kHalf].y, chunk.z, chunk.w);
    store_chunk(row_of_chunk(first_chunk, row), chunk);
  }
  if (__any_sync(0xffffffffu, spoilt != 0)) spoil_half(spoilt, first_chunk, kHalf, lane);
}

}  // namespace chiasma::sm90_sparse_fp8
