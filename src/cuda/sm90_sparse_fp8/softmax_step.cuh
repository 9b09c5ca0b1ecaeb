// Stage softmax_step: raw scores to weights relative to a running reference, and what the accumulators must be
// multiplied by when that reference moves.
//
// A token's share of output tile t is its probability times its scale of that tile. With 2^u the token's scale unit,
// which is the largest of its scales, the weight is 2^(score + u - reference) * (scale / 2^u). So the reference follows
// score + u, and neither small scales of probable tokens nor large scales of improbable ones leave f16's range.
#pragma once

#include <cfloat>
#include <cmath>
#include <numbers>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/sm90_sparse_fp8/accumulate_pv.cuh"

namespace chiasma::sm90_sparse_fp8 {

// A thread's view of its two heads (rows lane / 4 and lane / 4 + 8 of its warp).
struct SoftmaxState {
  float reference[2];  // log2; -infinity until a valid token is seen
  float sum[2];        // of this thread's share of this warpgroup's blocks, relative to reference; see WideSum

  __device__ void reset() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
};

// -infinity minus itself must count as "nothing there yet", not as NaN.
__device__ __forceinline__ float finite_or_zero(float reference) {
  return reference == -INFINITY ? 0.0f : reference;
}

// Seldom does anything. far: whether a far unit was among the piece's tokens.
__device__ __forceinline__ void move_reference(SoftmaxState& state, OutputTile (&output)[kOutputTiles],
                                               const float (&reference)[2], const std::uint32_t& far) {
  const bool moved[2] = {reference[0] != state.reference[0], reference[1] != state.reference[1]};
  if (!__any_sync(0xffffffffu, moved[0] || moved[1])) return;
  const bool is_far = any_far_unit(far);
  float by[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float log2_by = moved[r] ? state.reference[r] - finite_or_zero(reference[r]) : 0.0f;
    by[r] = ptx::exp2_approx(log2_by);
    const float wide =
        scaled_wide(state.sum[r], ptx::exp2_approx(0.5f * log2_by), ptx::exp2_approx(0.5f * (log2_by + kLowLog2)));
    state.sum[r] = is_far ? wide : state.sum[r] * by[r];
    state.reference[r] = reference[r];
  }
#pragma unroll
  for (OutputTile& tile : output) {
#pragma unroll
    for (int i = 0; i < kTileColumns / 2; ++i) tile[i] *= by[i / 2 % 2];
  }
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// What turns a raw score times the token's RoPE factor into log2 of a probability, for a head that load_q prepared.
__device__ __forceinline__ float head_scale(const SmemPlan& smem, float sm_scale, int row) {
  const float query_factor = __uint_as_float(static_cast<std::uint32_t>(smem.query_exponent[row]) << 23);
  // Finite, so that the zero scores of masked tokens stay zero.
  return fminf(fabsf(sm_scale) * std::numbers::log2e_v<float> * query_factor, FLT_MAX);
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

__device__ __forceinline__ void raise_reference(SoftmaxState& state, OutputTile (&output)[kOutputTiles],
                                                const float (&most)[2], const std::uint32_t& far) {
  float reference[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exceeded = most[r] > state.reference[r] + (kWeightTargetLog2 + kLazyRaiseLog2);
    reference[r] = exceeded ? most[r] - kWeightTargetLog2 : state.reference[r];
  }
  move_reference(state, output, reference, far);
}

// Where a lane of a warp keeps what registers have no room for: the warp's rows of P, before P is there.
__device__ __forceinline__ float* lane_scratch(SmemPlan& smem, int warp, int lane) {
  constexpr int kWarpFloats = sizeof(SmemPlan::p) / sizeof(float) / kWarpsPerWarpgroup;
  static_assert(kWarpFloats == kScoresPerThread / 2 * kWarpThreads);
  return reinterpret_cast<float*>(smem.p) + warp * kWarpFloats + lane;
}

// What the sums become by a block of probabilities whose weights may underflow though they do not: each of them is one
// power of two. They are left in the scratch memory. PERF: seldom, but amid what always runs, so that the code is
// small.
__device__ __forceinline__ void sum_far_probabilities(SoftmaxState& state, const ScoreTile& scores, SmemPlan& smem,
                                                      std::uint32_t stage, int warp, int lane) {
  constexpr int kScores = kScoresPerThread / 2;  // of a head
  float* const scratch = lane_scratch(smem, warp, lane);
  float sums[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scratch[i * kWarpThreads] = scores[i / 2 * 4 + 2 * r + i % 2];
    WideSum sum = WideSum::unpack(state.sum[r]);
    const float offset = finite_or_zero(state.reference[r]);
#pragma unroll 1
    for (int i = 0; i < kScores; ++i) {
      const float score = scratch[i * kWarpThreads];
      const TokenWeights& weights = smem.tokens[stage][group_of_pair(i / 2, lane)].weights;
      const float log2_unit = weights.score[2 * half_of_pair(lane) + i % 2].y;
      // A masked token has no unit.
      sum.add(score == -INFINITY ? score : score - offset - log2_unit, ptx::exp2_approx);
    }
    sums[r] = sum.pack();
    state.sum[r] = 0.0f;
  }
  scratch[0] = sums[0];
  scratch[kWarpThreads] = sums[1];
}

// Keeps the compiler from putting off a sum, which would hold all its terms in registers while P needs those: the store
// never happens, since no sum of near weights is negative, but whether it does must be known here.
__device__ __forceinline__ void complete_here(float sum, void* where) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" ::"f"(sum),
               "r"(ptx::shared_address(where))
               : "memory");
}

// Weights without their scales, [j][r]: tokens 8 j + 2 (lane % 4) and the next, head r, in f16.
using Exponentials = std::uint32_t[kBlockTokens / 8][2];

__device__ __forceinline__ void exponentiate(Exponentials& exponentials, ScoreTile& scores, SoftmaxState& state,
                                             SmemPlan& smem, std::uint32_t stage, int warp, int lane) {
  const bool far = any_far_unit(smem.far_units);
  if (far) sum_far_probabilities(state, scores, smem, stage, warp, lane);
  const float offset[2] = {finite_or_zero(state.reference[0]), finite_or_zero(state.reference[1])};
  // PERF: all exponentials before anything that needs one, since they come from a unit with a queue.
#pragma unroll
  for (int i = 0; i < kScoresPerThread; ++i) scores[i] = ptx::exp2_approx(scores[i] - offset[i / 2 % 2]);
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const TokenWeights& weights = smem.tokens[stage][group_of_pair(j, lane)].weights;
    const float2 inverse_unit = reinterpret_cast<const float2*>(weights.inverse_unit)[half_of_pair(lane)];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float low = scores[j * 4 + 2 * r];
      const float high = scores[j * 4 + 2 * r + 1];
      state.sum[r] = fmaf(low, inverse_unit.x, fmaf(high, inverse_unit.y, state.sum[r]));
      exponentials[j][r] = ptx::pack_half2(low, high);
    }
  }
  complete_here(state.sum[0], smem.p);
  complete_here(state.sum[1], smem.p);
  if (far) {
    state.sum[0] = lane_scratch(smem, warp, lane)[0];
    state.sum[1] = lane_scratch(smem, warp, lane)[kWarpThreads];
  }
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
        own[0][step][half * 2 + r] = ptx::multiply_half2(exponentials[j][r], scale.x);
        own[1][step][half * 2 + r] = ptx::multiply_half2(exponentials[j][r], scale.y);
        fragment[0][half * 2 + r] = ptx::multiply_half2(exponentials[j][r], scale.z);
        fragment[1][half * 2 + r] = ptx::multiply_half2(exponentials[j][r], scale.w);
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
