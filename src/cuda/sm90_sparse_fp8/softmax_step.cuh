// Stage softmax_step: raw scores to probabilities relative to a running reference, and what the accumulators must be
// multiplied by when that reference moves.
#pragma once

#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/sm90_sparse_fp8/accumulate_pv.cuh"

namespace chiasma::sm90_sparse_fp8 {

// A thread's view of its two heads (rows lane / 4 and lane / 4 + 8 of its warp).
struct SoftmaxState {
  float reference[2];  // log2; -infinity until a valid token is seen
  float sum[2];        // of this thread's share of this warpgroup's blocks, relative to reference
  float factor;        // unit of the accumulators: the largest token factor so far

  __device__ void reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    factor = 0.0f;
  }
};

// Multipliers for the accumulators; `needed` is the same for all threads of a warp.
struct Rescale {
  float by[2];
  bool needed;
};

// -infinity minus itself must count as "nothing there yet", not as NaN.
__device__ __forceinline__ float finite_or_zero(float reference) {
  return reference == -INFINITY ? 0.0f : reference;
}

// Moves the state to a new reference and unit.
__device__ __forceinline__ Rescale move_reference(SoftmaxState& state, const float (&reference)[2], float factor) {
  Rescale rescale;
  // Both are powers of two or 0, so that the quotient is exact; 0 only before anything was accumulated.
  const float unit = factor == state.factor ? 1.0f : state.factor / factor;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shrink = ptx::exp2_approx(state.reference[r] - finite_or_zero(reference[r]));
    rescale.by[r] = reference[r] == state.reference[r] ? unit : shrink * unit;
    if (reference[r] != state.reference[r]) state.sum[r] *= shrink;
    state.reference[r] = reference[r];
  }
  state.factor = factor;
  rescale.needed = __any_sync(0xffffffffu, rescale.by[0] != 1.0f || rescale.by[1] != 1.0f);
  return rescale;
}

__device__ __forceinline__ void apply(const Rescale& rescale, OutputTile (&output)[kOutputTiles]) {
  if (!rescale.needed) return;
#pragma unroll
  for (OutputTile& tile : output) {
#pragma unroll
    for (int i = 0; i < kTileColumns / 2; ++i) tile[i] *= rescale.by[i / 2 % 2];
  }
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// scores become P in f16, packed as the left operand of PV.
__device__ __forceinline__ Rescale softmax_step(ScoreTile& scores, SoftmaxState& state, Probabilities& probabilities,
                                                const SmemPlan& smem, std::uint32_t stage, int warp, int lane) {
  const float head_scale[2] = {smem.head_scale[warp * 16 + lane / 4], smem.head_scale[warp * 16 + lane / 4 + 8]};
  // The weights of two neighbouring tokens: factor, bias, factor, bias.
  const float4* weights = reinterpret_cast<const float4*>(smem.token[stage]) + lane % 4;
  float most[2] = {-INFINITY, -INFINITY};
  float factor = state.factor;
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const float4 pair = weights[j * 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[j * 4 + i];
      score = i % 2 == 0 ? fmaf(score, pair.x, pair.y) : fmaf(score, pair.z, pair.w);
      most[i / 2] = fmaxf(most[i / 2], score);
    }
    factor = fmaxf(factor, fmaxf(pair.x, pair.z));
  }
  factor = quad_max(factor);
  float reference[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = quad_max(most[r]) * head_scale[r];
    reference[r] = most[r] > state.reference[r] + kLazyRaiseLog2 ? most[r] : state.reference[r];
  }
  const Rescale rescale = move_reference(state, reference, factor);

  // With every token masked so far factor is 0, and so is every P.
  const float inverse_unit = factor != 0.0f ? 1.0f / factor : 0.0f;
  const float offset[2] = {finite_or_zero(reference[0]), finite_or_zero(reference[1])};
  // PERF: all exponentials before anything that needs one, since they come from a unit with a queue.
#pragma unroll
  for (int i = 0; i < kScoresPerThread; ++i) {
    scores[i] = ptx::exp2_approx(fmaf(scores[i], head_scale[i / 2 % 2], -offset[i / 2 % 2]));
  }
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const float4 pair = weights[j * 4];
    const float weight[2] = {pair.x * inverse_unit, pair.z * inverse_unit};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float low = scores[j * 4 + 2 * r];
      const float high = scores[j * 4 + 2 * r + 1];
      state.sum[r] += low + high;
      probabilities[j / 2][j % 2 * 2 + r] = ptx::pack_half2(low * weight[0], high * weight[1]);
    }
  }
  return rescale;
}

// Hands P and the new references to the other warpgroup.
__device__ __forceinline__ void publish_p(const Probabilities& probabilities, const SoftmaxState& state, SmemPlan& smem,
                                          std::uint32_t stage, int warp, int lane) {
  const std::uint32_t row = warp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<std::uint32_t*>(smem.p + tile::chunk_offset(row + 8 * r, j) + lane % 4 * 4) =
          probabilities[j / 2][j % 2 * 2 + r];
    }
  }
  if (lane % 4 == 0) {
    smem.reference[stage][row] = state.reference[0];
    smem.reference[stage][row + 8] = state.reference[1];
  }
  if (warp == 0 && lane == 0) smem.factor_reference[stage] = state.factor;
}

}  // namespace chiasma::sm90_sparse_fp8
