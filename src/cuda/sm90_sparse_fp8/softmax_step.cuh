// Stage softmax_step: raw scores to weights relative to a running reference, and what the accumulators must be
// multiplied by when that reference moves.
//
// A token's share of output tile t is its probability times its scale of that tile. With 2^u the token's scale unit,
// the largest of its scales rounded down to a power of two, the weight is 2^(score + u - reference) * (scale / 2^u). So
// the reference follows score + u, and neither small scales of probable tokens nor large scales of improbable ones
// leave f16's range.
#pragma once

#include <cfloat>
#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/sm90_sparse_fp8/accumulate_pv.cuh"

namespace chiasma::sm90_sparse_fp8 {

inline constexpr float kLog2E = 1.4426950408889634f;

// A thread's view of its two heads (rows lane / 4 and lane / 4 + 8 of its warp).
struct SoftmaxState {
  float reference[2];  // log2; -infinity until a valid token is seen
  float sum[2];        // of this thread's share of this warpgroup's blocks, relative to reference

  __device__ void reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
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

__device__ __forceinline__ Rescale move_reference(SoftmaxState& state, const float (&reference)[2]) {
  Rescale rescale;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool moved = reference[r] != state.reference[r];
    rescale.by[r] = moved ? ptx::exp2_approx(state.reference[r] - finite_or_zero(reference[r])) : 1.0f;
    state.sum[r] *= rescale.by[r];
    state.reference[r] = reference[r];
  }
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

// What turns a raw score times the token's RoPE factor into log2 of a probability, for a head that load_q prepared.
__device__ __forceinline__ float head_scale(const SmemPlan& smem, float sm_scale, int row) {
  const float query_factor = __uint_as_float(static_cast<std::uint32_t>(smem.query_exponent[row]) << 23);
  // Finite, so that the zero scores of masked tokens stay zero.
  return fminf(fabsf(sm_scale) * kLog2E * query_factor, FLT_MAX);
}

// scores become log2 of weights without a reference; most: of the thread's two heads, over the whole block.
__device__ __forceinline__ void weigh_scores(ScoreTile& scores, float (&most)[2],
                                             const TokenGroup (&groups)[kTokenGroups], const float (&scale)[2],
                                             int lane) {
  most[0] = most[1] = -INFINITY;
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const TokenWeights& weights = groups[group_of_pair(j, lane)].weights;
    // Factor and unit of two tokens.
    const float4 pair = reinterpret_cast<const float4*>(weights.score)[half_of_pair(lane)];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[j * 4 + i];
      score = i % 2 == 0 ? fmaf(score * pair.x, scale[i / 2], pair.y) : fmaf(score * pair.z, scale[i / 2], pair.w);
      most[i / 2] = fmaxf(most[i / 2], score);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) most[r] = quad_max(most[r]);
}

__device__ __forceinline__ Rescale raise_reference(SoftmaxState& state, const float (&most)[2]) {
  float reference[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exceeded = most[r] > state.reference[r] + (kWeightTargetLog2 + kLazyRaiseLog2);
    reference[r] = exceeded ? most[r] - kWeightTargetLog2 : state.reference[r];
  }
  return move_reference(state, reference);
}

// Weights without their scales, [j][r]: tokens 8 j + 2 (lane % 4) and the next, head r, in f16.
using Exponentials = std::uint32_t[kBlockTokens / 8][2];

__device__ __forceinline__ void exponentiate(Exponentials& exponentials, ScoreTile& scores, SoftmaxState& state,
                                             const TokenGroup (&groups)[kTokenGroups], int lane) {
  const float offset[2] = {finite_or_zero(state.reference[0]), finite_or_zero(state.reference[1])};
  // PERF: all exponentials before anything that needs one, since they come from a unit with a queue.
#pragma unroll
  for (int i = 0; i < kScoresPerThread; ++i) scores[i] = ptx::exp2_approx(scores[i] - offset[i / 2 % 2]);
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const TokenWeights& weights = groups[group_of_pair(j, lane)].weights;
    const float2 inverse_unit = reinterpret_cast<const float2*>(weights.inverse_unit)[half_of_pair(lane)];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float low = scores[j * 4 + 2 * r];
      const float high = scores[j * 4 + 2 * r + 1];
      state.sum[r] = fmaf(low, inverse_unit.x, fmaf(high, inverse_unit.y, state.sum[r]));
      exponentials[j][r] = ptx::pack_half2(low, high);
    }
  }
}

__device__ __forceinline__ std::uint32_t multiply_half2(std::uint32_t a, std::uint32_t b) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}

// P of both warpgroups: this one's stays in registers, the other's goes to shared memory, with the new references.
__device__ __forceinline__ void publish_p(Probabilities (&own)[kOutputTiles], const Exponentials& exponentials,
                                          const SoftmaxState& state, SmemPlan& smem, std::uint32_t stage, int warp,
                                          int lane) {
  const TokenGroup(&groups)[kTokenGroups] = smem.tokens[stage];
  // A lane's row of the 16 x 16 fragment that a store spreads: chunk 2 step + lane / 16 of row lane % 16.
  const std::uint32_t offset = tile::chunk_offset(warp * 16 + lane % 16, lane / 16);
  const std::uint32_t other[kOutputTiles] = {ptx::shared_address(smem.p) + offset,
                                             ptx::shared_address(smem.kv[stage][kRopePanel]) + offset};
#pragma unroll
  for (int step = 0; step < kPvSteps; ++step) {
    std::uint32_t fragment[kOutputTiles][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * step + half;
      const TokenWeights& weights = groups[group_of_pair(j, lane)].weights;
      const uint4 scale = *reinterpret_cast<const uint4*>(weights.scale[half_of_pair(lane)]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        own[0][step][half * 2 + r] = multiply_half2(exponentials[j][r], scale.x);
        own[1][step][half * 2 + r] = multiply_half2(exponentials[j][r], scale.y);
        fragment[0][half * 2 + r] = multiply_half2(exponentials[j][r], scale.z);
        fragment[1][half * 2 + r] = multiply_half2(exponentials[j][r], scale.w);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kOutputTiles; ++tile) {
      ptx::stmatrix_x4(other[tile] ^ (step * 2 * tile::kChunkBytes), fragment[tile][0], fragment[tile][1],
                       fragment[tile][2], fragment[tile][3]);
    }
  }
  if (lane % 4 == 0) {
    smem.reference[warp * 16 + lane / 4] = state.reference[0];
    smem.reference[warp * 16 + lane / 4 + 8] = state.reference[1];
  }
}

}  // namespace chiasma::sm90_sparse_fp8
