// Stage prepare_factors: what QK and PV multiply with, from the scales of a token.
#pragma once

#include <cuda_fp16.h>

#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

// Exponent of the power of two that is taken out of a token's scales before PV and put into its probability.
__device__ __forceinline__ int unit_exponent(const float4& scales) {
  const float most = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127 - kScaleTargetExponent;
  return min(max(exponent, kLeastUnitExponent), kMostUnitExponent);
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<std::uint32_t>(127 + exponent) << 23);
}

// Beyond these bounds, or no number.
__device__ __forceinline__ bool is_extreme(float ratio) {
  return !(fabsf(ratio) <= kMostScaleRatio && fabsf(ratio) >= 1.0f / kMostScaleRatio);
}

__device__ __forceinline__ void prepare_factors(ScoreFactors& factors, ValueScales& value_scales, const float4& scales,
                                                bool valid, int token) {
  const int exponent = unit_exponent(scales);
  const float inverse = power_of_two(-exponent);
  const float values[v32::kNumTiles] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
  for (int tile = 0; tile < v32::kNumTiles; ++tile) {
    value_scales[tile][token] = __half_as_ushort(__float2half_rn(values[tile] * inverse));
  }
  bool needs_care = abs(exponent) > kNearUnitExponent;
#pragma unroll
  for (int tile = 0; tile + 1 < v32::kNumTiles; ++tile) {
    const float ratio = values[tile] * ptx::reciprocal_approx(values[tile + 1]);
    factors.ratio[tile][token] = ratio;
    needs_care = needs_care || is_extreme(ratio);
  }
  factors.unit[token] = !valid ? -INFINITY : needs_care ? NAN : static_cast<float>(exponent);
}

}  // namespace chiasma::sm90_sparse_fp8_direct
