// Stage prepare_factors: what QK and PV multiply with, from the scales of a token.
#pragma once

#include <cuda_fp16.h>

#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"
#include "cuda/tile/bf16_words.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// Beyond these bounds, or no number.
__device__ __forceinline__ bool is_extreme(float ratio) {
  return !(fabsf(ratio) <= kMostScaleRatio && fabsf(ratio) >= 1.0f / kMostScaleRatio);
}

__device__ __forceinline__ float clamp_unit(float unit) {
  return fminf(fmaxf(unit, kLeastUnit), kMostUnit);
}

__device__ __forceinline__ std::uint16_t half_bits(float value) {
  return __half_as_ushort(__float2half_rn(value));
}

// What a token's scales say. unit() is what is taken out of them before PV and put into the token's probability. After
// begin() value scales follow in kRounds calls of go_on(), since QK goes on meanwhile and its warps work in order.
template <typename Config, Scaling kScaling = Config::kScaling>
struct TokenScales;

// Any float32. The unit is the largest over kScaleTarget: codes of the tile with that scale are then exact as operands.
template <typename Config>
struct TokenScales<Config, Scaling::ratios> {
  static constexpr int kTiles = Config::kTraits.num_scales();
  static_assert(kTiles == 4);
  float4 scales;

  __device__ void load(const RowBlock<Config>& block, int token) { scales = block.scales(token); }

  __device__ float unit() const {
    const float most = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
    return clamp_unit(most * (1.0f / kScaleTarget));
  }

  static constexpr int kRounds = 0;
  __device__ void begin(ScoreFactors<Config>& factors, ValueScales<Config>& value_scales, bool valid, int token) {
    const float own_unit = unit();
    const float inverse = ptx::reciprocal_ftz(own_unit);
    const float values[kTiles] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) value_scales.code[tile][token] = half_bits(values[tile] * inverse);
    const float exponent = ptx::log2_approx(own_unit);
    bool needs_care = fabsf(exponent) > kNearUnitExponent;
#pragma unroll
    for (int tile = 0; tile + 1 < kTiles; ++tile) {
      const float ratio = values[tile] * ptx::reciprocal_approx(values[tile + 1]);
      factors.ratio[tile][token] = ratio;
      needs_care = needs_care || is_extreme(ratio);
    }
    factors.unit[token] = !valid ? -INFINITY : needs_care ? NAN : exponent;
  }
};

// Powers of two. Nearly always there is nothing to take out: see kLeastPlainExponent. Where there is, the unit is such
// that codes times scales, and values that are no codes, fit f16.
template <typename Config>
struct TokenScales<Config, Scaling::operands> {
  static constexpr int kTiles = Config::kTraits.num_scales();
  static constexpr int kWords = (kTiles + 3) / 4;
  std::uint32_t word[kWords];
  std::uint32_t most_bf16;  // largest of the values that are no codes, as bits without sign

  __device__ void load(const RowBlock<Config>& block, int token) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = block.exponents(token, 4 * i);
    most_bf16 = 0;
    if constexpr (Config::kHasBf16Values) {
      const auto* values = reinterpret_cast<const uint4*>(block.row[token] + Config::kTraits.bf16_offset);
      std::uint32_t packed = 0;
      // PERF: two at a time, since registers are full of products here.
#pragma unroll 2
      for (int i = 0; i < 2 * Config::kTraits.bf16_columns / 16; ++i) {
        packed = __vmaxu2(packed, tile::packed_magnitude(values[i]));
      }
      most_bf16 = tile::larger_half(packed);
    }
  }

  __device__ std::uint32_t exponent(int tile) const {
    return word[tile / 4] >> tile % 4 * 8 & 0xffu;
  }

  // Of all tiles: `combine` of packed bytes, which leaves `neutral` alone.
  template <typename Combine>
  __device__ std::uint32_t over_tiles(std::uint32_t neutral, Combine&& combine) const {
    std::uint32_t packed = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      // The bytes behind the last scale are nobody's.
      const std::uint32_t own = kTiles >= 4 * i + 4 ? 0xffffffffu : (1u << (kTiles - 4 * i) * 8) - 1u;
      packed = combine(packed, (word[i] & own) | (neutral & ~own));
    }
    packed = combine(packed, packed >> 16 | packed << 16);
    return combine(packed, packed >> 8 | packed << 24) & 0xffu;
  }
  __device__ std::uint32_t most_exponent() const {
    return over_tiles(0, [](std::uint32_t a, std::uint32_t b) { return __vmaxu4(a, b); });
  }
  __device__ std::uint32_t least_exponent() const {
    return over_tiles(0xffffffffu, [](std::uint32_t a, std::uint32_t b) { return __vminu4(a, b); });
  }
  __device__ bool is_plain() const {
    const bool bf16_is_plain = most_bf16 == 0 || (most_bf16 >= kLeastPlainBf16 && most_bf16 < kMostPlainBf16);
    return least_exponent() >= kLeastPlainExponent && most_exponent() <= kMostPlainExponent && bf16_is_plain;
  }

  __device__ float unit() const {
    if (is_plain()) return 1.0f;
    const float most_scale = ue8m0_to_float(static_cast<std::uint8_t>(most_exponent()));
    const float for_codes = most_scale * (1.0f / kScaleTarget);
    // With a NaN or an infinity among them the token's score is one, too, whatever the unit is.
    const float for_bf16 = __uint_as_float((most_bf16 & 0x7f80u) << 16) * 0x1p-14f;
    return clamp_unit(fmaxf(for_codes, for_bf16));
  }

  static constexpr int kTilesAtOnce = 2;
  static constexpr int kRounds = (Config::kValueTilesScaled + kTilesAtOnce - 1) / kTilesAtOnce;

  __device__ void begin(ScoreFactors<Config>& factors, ValueScales<Config>& value_scales, bool valid, int token) {
    plain = is_plain();
    inverse = plain ? 1.0f : ptx::reciprocal_ftz(unit());
    if constexpr (Config::kHasBf16Values) value_scales.bf16[token] = inverse;
    factors.unit[token] = !valid ? -INFINITY : plain ? 0.0f : NAN;
  }

  __device__ void go_on(ValueScales<Config>& value_scales, int round, int token) const {
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      const int tile = round * kTilesAtOnce + i;
      if (tile >= Config::kValueTilesScaled) continue;
      // A normal f16 number has its exponent 112 lower.
      std::uint32_t code = (exponent(tile) - (127 - 15)) << 10;
      if (!plain) code = half_bits(ue8m0_to_float(static_cast<std::uint8_t>(exponent(tile))) * inverse);
      value_scales.code[tile][token] = static_cast<std::uint16_t>(code);
    }
  }

 private:
  bool plain;
  float inverse;
};

// The cache's one scale is elsewhere.
template <typename Config>
struct TokenScales<Config, Scaling::none> {
  __device__ void load(const RowBlock<Config>& /*block*/, int /*token*/) {}
  __device__ float unit() const { return 1.0f; }
  static constexpr int kRounds = 0;
  __device__ void begin(ScoreFactors<Config>& factors, ValueScales<Config>& /*value_scales*/, bool valid, int token) {
    factors.unit[token] = valid ? 0.0f : -INFINITY;
  }
};

}  // namespace chiasma::sm90_sparse_fp8_direct
