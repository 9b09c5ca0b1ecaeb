// Stage dequantize_kv: gathered rows to a f16 tile in shared memory.
//
// value = code * scale / factor, rounded once: the scale is split into a leading f16 part and the remainder, so that
// code * high + code * low in f16 fused arithmetic equals the exact float32 scale's product rounded to f16.
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
  std::uint32_t rows;     // shared address of the warp's first row in the stage's first panel
  std::uint32_t weights;  // shared address of the warp's first token weight
};

__device__ __forceinline__ void store_chunk(std::uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_weight(std::uint32_t address, TokenWeight weight) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(weight.factor), "f"(weight.bias) : "memory");
}

// What the conversion of a row needs.
struct RowScaling {
  __half2 scale;              // lane l: (leading part, remainder) of scale / factor of row l / 4 % 4, tile l % 4
  std::uint32_t exponent;     // lane l: biased float32 exponent of the factor of row l / 4 % 4
  float inverse_rope_factor;  // lane l: 1 / factor of row l / 8
};

// Clamped so that the factor and its inverse are normal numbers.
__device__ __forceinline__ std::uint32_t clamp_exponent(int exponent) {
  return static_cast<std::uint32_t>(min(max(exponent, 12), 242));
}

__device__ __forceinline__ RowScaling scale_rows(const GatheredRows& rows, int lane) {
  std::uint32_t most = __float_as_uint(rows.scale) & 0x7fffffffu;
  most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
  most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
  RowScaling scaling;
  scaling.exponent = clamp_exponent(static_cast<int>(most >> 23) - kScaleTargetExponent);
  std::uint32_t rope_exponent = __shfl_sync(0xffffffffu, scaling.exponent, lane / 8 * 4);
  const std::uint32_t rope_needs = tile::larger_half(tile::packed_magnitude(rows.rope)) >> 7;
  if (__any_sync(0xffffffffu, rope_needs > rope_exponent + kRopeTargetExponent)) {
    // Seldom: RoPE values beyond the reach of the scales. The row's factor then follows them.
    std::uint32_t row_needs = rope_needs;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) row_needs = max(row_needs, __shfl_xor_sync(0xffffffffu, row_needs, step));
    row_needs = __shfl_sync(0xffffffffu, row_needs, lane / 4 % kRowsPerWarp * 8);
    scaling.exponent = max(scaling.exponent, clamp_exponent(static_cast<int>(row_needs) - kRopeTargetExponent));
    rope_exponent = __shfl_sync(0xffffffffu, scaling.exponent, lane / 8 * 4);
  }
  scaling.inverse_rope_factor = __uint_as_float((254u - rope_exponent) << 23);
  const float scale = rows.scale * __uint_as_float((254u - scaling.exponent) << 23);
  const __half high = __float2half_rn(scale);
  // An infinite scale has no remainder; infinity minus itself would turn its finite products into NaN.
  const __half low = __hisinf(high) ? __half(0.0f) : __float2half_rn(scale - __half2float(high));
  scaling.scale = __halves2half2(high, low);
  return scaling;
}

__device__ __forceinline__ std::uint32_t scaled_half2(std::uint32_t codes, __half2 high, __half2 low) {
  const __half2 exact = ptx::e4m3x2_to_half2(static_cast<std::uint16_t>(codes));
  const __half2 value = __hfma2(exact, high, __hmul2(exact, low));
  return *reinterpret_cast<const std::uint32_t*>(&value);
}

__device__ __forceinline__ uint4 scaled_chunk(std::uint32_t codes0, std::uint32_t codes1, __half2 high, __half2 low) {
  return make_uint4(scaled_half2(codes0, high, low), scaled_half2(codes0 >> 16, high, low),
                    scaled_half2(codes1, high, low), scaled_half2(codes1 >> 16, high, low));
}

// Lane l's 16 codes are chunks 2 (l % 4) and 2 (l % 4) + 1 of panel l / 4. Lanes of odd panels store their second chunk
// first, so that the eight lanes of a store phase meet eight different bank groups.
__device__ __forceinline__ bool stores_second_first(int lane) {
  return (lane / 4 & 1) != 0;
}

// Address of the chunk that a lane stores first, for the warp's row 0. The swizzle is an exclusive or of the chunk's
// bits with the row's number, and panels are aligned, so that row i is `^ i * 16` and `+ i * 128` away.
__device__ __forceinline__ std::uint32_t first_chunk_address(const TileTarget& target, int first_row_in_atom,
                                                             int lane) {
  const std::uint32_t chunk = lane % 4 * 2 + (stores_second_first(lane) ? 1 : 0);
  return target.rows + lane / 4 * kPanelBytes + (chunk ^ first_row_in_atom) * tile::kChunkBytes;
}

__device__ __forceinline__ void dequantize_codes(const uint4& codes, const RowScaling& scaling,
                                                 std::uint32_t first_chunk, int index, int lane) {
  const __half2 scale = __shfl_sync(0xffffffffu, scaling.scale, index * 4 + lane / 8);
  const __half2 high = __low2half2(scale);
  const __half2 low = __high2half2(scale);
  const bool swap = stores_second_first(lane);
  const std::uint32_t address = first_chunk ^ (index * tile::kChunkBytes);
  const int row_offset = index * tile::kPanelRowBytes;
  store_chunk(address + row_offset, scaled_chunk(swap ? codes.z : codes.x, swap ? codes.w : codes.y, high, low));
  store_chunk((address ^ tile::kChunkBytes) + row_offset,
              scaled_chunk(swap ? codes.x : codes.z, swap ? codes.y : codes.w, high, low));
}

__device__ __forceinline__ void dequantize_rope(const GatheredRows& rows, const RowScaling& scaling,
                                                const TileTarget& target, int first_row_in_atom, int lane) {
  const int row = lane / 8;
  const std::uint32_t chunk = lane % 8 ^ (first_row_in_atom + row);
  store_chunk(target.rows + kRopePanel * kPanelBytes + row * tile::kPanelRowBytes + chunk * tile::kChunkBytes,
              tile::scaled_half8(rows.rope, scaling.inverse_rope_factor));
  if (lane % 4 == 0 && lane < 4 * kRowsPerWarp) {
    const TokenWeight weight =
        rows.valid ? TokenWeight{__uint_as_float(scaling.exponent << 23), 0.0f} : TokenWeight{0.0f, -INFINITY};
    store_weight(target.weights + lane / 4 * sizeof(TokenWeight), weight);
  }
}

// after_rows(first): called when rows [first, first + kRowsPerSend) of the warp lie in shared memory; RoPE values and
// weights of all rows lie there before.
template <typename AfterRows>
__device__ __forceinline__ void dequantize_rows(const GatheredRows& rows, const TileTarget& target,
                                                int first_row_in_atom, int lane, AfterRows&& after_rows) {
  const RowScaling scaling = scale_rows(rows, lane);
  dequantize_rope(rows, scaling, target, first_row_in_atom, lane);
  const std::uint32_t first_chunk = first_chunk_address(target, first_row_in_atom, lane);
#pragma unroll
  for (int index = 0; index < kRowsPerWarp; ++index) {
    dequantize_codes(rows.codes[index], scaling, first_chunk, index, lane);
    if (index % kRowsPerSend == kRowsPerSend - 1) after_rows(index - (kRowsPerSend - 1));
  }
}

}  // namespace chiasma::sm90_sparse_fp8
