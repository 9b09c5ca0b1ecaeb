// A token's scales. Tiles hold bare codes, so that nothing is rounded there: scales enter in float32 between the
// products of QK (score_qk) and, rounded once, into the weights of PV (softmax_step).
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8/config.h"
#include "cuda/sm90_sparse_fp8/wide_sum.h"

namespace chiasma::sm90_sparse_fp8 {

inline constexpr int kGroupTokens = 4;  // tokens whose scales lie together: a producer warp's rows of a step
inline constexpr int kTokenGroups = kBlockTokens / kGroupTokens;

// As the producers leave them. A sum over scale tiles needs one accumulator only, if it is scaled by ratio[t] after the
// products of tile t: the scale of tile t over that of tile t + 1 or, for the last, over the RoPE factor.
struct StoredScales {
  float ratio[kScaleTiles][kGroupTokens];
  // Two bf16: the RoPE factor, a power of two, and above it log2 of the token's scale unit, -infinity if the token is
  // masked.
  std::uint32_t exponents[kGroupTokens];
};

// What the math warpgroup that owns the block makes of them in place.
struct TokenWeights {
  float2 score[kGroupTokens];        // RoPE factor; log2 of the scale unit, or -infinity
  float inverse_unit[kGroupTokens];  // 1 / scale unit
  __half2 scale[2][kScaleTiles];     // of two tokens, over the scale unit; the owner's tiles, then the other's
};

union alignas(16) TokenGroup {
  StoredScales stored;
  TokenWeights weights;
};
static_assert(sizeof(StoredScales) == sizeof(TokenGroup) && sizeof(TokenWeights) == sizeof(TokenGroup));

// Two neighbouring tokens of a fragment, 8 j + 2 (lane % 4) and the next: their group, and which half of it.
__device__ __forceinline__ int group_of_pair(int j, int lane) {
  return 2 * j + lane % 4 / 2;
}
__device__ __forceinline__ int half_of_pair(int lane) {
  return lane % 2;
}

// 2^-x for an integer from -127 to 126; 1 for -infinity.
__device__ __forceinline__ float inverse_power(float x) {
  // The sum's low mantissa bits are x in two's complement.
  return __uint_as_float(0x3f800000u - (__float_as_uint(x + 0x1.8p23f) << 23));
}

// One predicated instruction: with a branch here, ptxas builds the descriptors of the products around it in ordinary
// registers.
__device__ __forceinline__ void note_far_unit(std::uint32_t& far_units, float log2_unit) {
  const float distance = log2_unit == -INFINITY ? 0.0f : fabsf(log2_unit);
  asm volatile("{.reg .pred far; setp.gt.f32 far, %0, %1; @far st.shared.u32 [%2], 1;}" ::"f"(distance),
               "f"(kNearLog2Unit), "r"(ptx::shared_address(&far_units))
               : "memory");
}

// One predicated instruction, too.
__device__ __forceinline__ void note_valid(std::uint32_t& any_valid, float log2_unit) {
  asm volatile("{.reg .pred valid; setp.neu.f32 valid, %0, 0fFF800000; @valid st.shared.u32 [%1], 1;}" ::"f"(log2_unit),
               "r"(ptx::shared_address(&any_valid))
               : "memory");
}

__device__ __forceinline__ bool any_far_unit(const std::uint32_t& far_units) {
  std::uint32_t noted;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(noted) : "r"(ptx::shared_address(&far_units)) : "memory");
  return __any_sync(0xffffffffu, noted != 0);
}

// By a whole math warpgroup, once none of its warps needs the ratios any more. Notes whether a unit is a far one and
// whether a token is valid.
__device__ __forceinline__ void weigh_tokens(TokenGroup (&groups)[kTokenGroups], std::uint32_t& far_units,
                                             std::uint32_t& any_valid, int warpgroup, int warp, int lane) {
  constexpr int kTokensPerWarp = kBlockTokens / kWarpsPerWarpgroup;
  ptx::named_barrier_sync(kOwnerBarrier + warpgroup, kWarpgroupThreads);
  if (lane < kTokensPerWarp) {
    TokenGroup& group = groups[warp * (kTokensPerWarp / kGroupTokens) + lane / kGroupTokens];
    const int token = lane % kGroupTokens;
    const std::uint32_t exponents = group.stored.exponents[token];
    float scale[kScaleTiles];
#pragma unroll
    for (int tile = 0; tile < kScaleTiles; ++tile) scale[tile] = group.stored.ratio[tile][token];
    const float factor = __uint_as_float(exponents << 16);
    float log2_unit = __uint_as_float(exponents & 0xffff0000u);
    float inverse_unit = inverse_power(log2_unit);
    note_far_unit(far_units, log2_unit);
    note_valid(any_valid, log2_unit);
    scale[kScaleTiles - 1] *= factor * inverse_unit;
    float most = fabsf(scale[kScaleTiles - 1]);
#pragma unroll
    for (int tile = kScaleTiles - 2; tile >= 0; --tile) {
      scale[tile] *= scale[tile + 1];
      most = fmaxf(most, fabsf(scale[tile]));
    }
    // The largest scale itself becomes the unit, so that its tile's weights are rounded no more than probabilities are.
    // It is less than twice the power of two, except where that reaches for RoPE values or the token is masked. PERF:
    // no branch, see note_far_unit.
    most = fminf(fmaxf(most, 1.0f), 2.0f);
    const float inverse = ptx::reciprocal_ftz(most);
#pragma unroll
    for (float& each : scale) each *= inverse;
    inverse_unit *= inverse;
    log2_unit += ptx::log2_approx(most);
    // SYNC: all tokens of the group were read.
    __syncwarp((1u << kTokensPerWarp) - 1);
    group.weights.score[token] = make_float2(factor, log2_unit);
    group.weights.inverse_unit[token] = inverse_unit;
#pragma unroll
    for (int tile = 0; tile < kScaleTiles; ++tile) {
      const int place = tile ^ (warpgroup * (kScaleTiles / kMathWarpgroups));
      reinterpret_cast<__half*>(&group.weights.scale[token / 2][place])[token % 2] = __float2half_rn(scale[tile]);
    }
  }
  ptx::named_barrier_sync(kOwnerBarrier + warpgroup, kWarpgroupThreads);
}

}  // namespace chiasma::sm90_sparse_fp8
