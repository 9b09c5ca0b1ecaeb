// Stage prepare_factors: what QK and PV multiply with, from the scales of a token.
#pragma once

#include <cuda_fp16.h>

#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

// What is taken out of a token's scales before PV and put into its probability: its largest scale over
// kScaleTarget. Codes of the tile with that scale are then exact as operands.
__device__ __forceinline__ float unit_of(const float4& scales) {
  const float most = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
  return fminf(fmaxf(most * (1.0f / kScaleTarget), kLeastUnit), kMostUnit);
}

// Beyond these bounds, or no number.
__device__ __forceinline__ bool is_extreme(float ratio) {
  return !(fabsf(ratio) <= kMostScaleRatio && fabsf(ratio) >= 1.0f / kMostScaleRatio);
}

__device__ __forceinline__ void prepare_factors(ScoreFactors& factors, ValueScales& value_scales, const float4& scales,
                                                bool valid, int token) {
  const float unit = unit_of(scales);
  const float inverse = ptx::reciprocal_ftz(unit);
  const float values[v32::kNumTiles] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
  for (int tile = 0; tile < v32::kNumTiles; ++tile) {
    value_scales[tile][token] = __half_as_ushort(__float2half_rn(values[tile] * inverse));
  }
  const float exponent = ptx::log2_approx(unit);
  bool needs_care = fabsf(exponent) > kNearUnitExponent;
#pragma unroll
  for (int tile = 0; tile + 1 < v32::kNumTiles; ++tile) {
    const float ratio = values[tile] * ptx::reciprocal_approx(values[tile + 1]);
    factors.ratio[tile][token] = ratio;
    needs_care = needs_care || is_extreme(ratio);
  }
  factors.unit[token] = !valid ? -INFINITY : needs_care ? NAN : exponent;
}

}  // namespace chiasma::sm90_sparse_fp8_direct
