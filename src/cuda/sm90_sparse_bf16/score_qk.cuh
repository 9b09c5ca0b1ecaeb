// Stages score_qk and softmax_step: from rows of a block to P of its owner, [64 heads, 64 tokens].
#pragma once

#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_bf16.cuh"
#include "cuda/sm90_sparse_bf16/smem_plan.h"

namespace chiasma::sm90_sparse_bf16 {

// [4 j + 2 r + c]: head 16 warp + lane / 4 + 8 r, token 8 j + 2 (lane % 4) + c.
inline constexpr int kScoresPerThread = kHeadsPerCta * kBlockTokens / kWarpgroupThreads;
using Scores = float[kScoresPerThread];

inline constexpr int kStepsPerPanel = direct::kStepsPerPanel;
inline constexpr std::uint32_t kPanelUnits = kPanelBytes / 16;
inline constexpr std::uint32_t kKeyStepUnits = 2;

// Of a thread's two heads.
using OfHeads = float[2];

template <typename Config>
__device__ __forceinline__ void score_qk(Scores& scores, std::uint32_t query, std::uint32_t keys) {
  const std::uint64_t q = tile::descriptor(query, 0, tile::kAtomBytes);
  const std::uint64_t k = tile::descriptor(keys, 0, tile::kAtomBytes);
  ptx::wgmma_pin(scores);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kKeyPanels * kStepsPerPanel; ++step) {
    const std::uint32_t offset = step / kStepsPerPanel * kPanelUnits + step % kStepsPerPanel * kKeyStepUnits;
    ptx::wgmma_bf16_m64n64k16(scores, tile::advance(q, offset), tile::advance(k, offset), step > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(scores);
}

// -infinity minus itself must count as "nothing there yet", not as NaN.
__device__ __forceinline__ float finite_or_zero(float reference) {
  return reference == -INFINITY ? 0.0f : reference;
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Raw scores to log2 scores, -infinity where there is no token, and the references that they need. valid: of the block.
__device__ __forceinline__ void weigh_scores(Scores& scores, OfHeads& reference, const bool* valid,
                                             const OfHeads& factor, int lane) {
  OfHeads most = {-INFINITY, -INFINITY};
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
    const char2 pair = *reinterpret_cast<const char2*>(valid + 8 * j + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[4 * j + i];
      score = (i % 2 == 0 ? pair.x : pair.y) != 0 ? score * factor[i / 2] : -INFINITY;
      most[i / 2] = fmaxf(most[i / 2], score);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = quad_max(most[r]);
    if (most[r] > reference[r] + kLazyRaiseLog2) reference[r] = most[r];
  }
}

inline constexpr int kPvSteps = kBlockTokens / 16;
// A thread's part of P as a left operand, of each contraction step.
using Probabilities = std::uint32_t[kPvSteps][4];

// What results are divided by is a sum of rounded probabilities, so that a row that few tokens make up does not carry
// their rounding errors; lse comes from the plain sum.
struct Sums {
  OfHeads plain, rounded;
};

// Log2 scores to probabilities; sums grow by them.
__device__ __forceinline__ void exponentiate(Probabilities& probabilities, Scores& scores, Sums& sums,
                                             const OfHeads& reference) {
  const OfHeads offset = {finite_or_zero(reference[0]), finite_or_zero(reference[1])};
  // PERF: all exponentials before anything that needs one, since they come from a unit with a queue.
#pragma unroll
  for (int i = 0; i < kScoresPerThread; ++i) scores[i] = ptx::exp2_approx(scores[i] - offset[i / 2 % 2]);
#pragma unroll
  for (int j = 0; j < kBlockTokens / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float even = scores[4 * j + 2 * r], odd = scores[4 * j + 2 * r + 1];
      const std::uint32_t pair = ptx::pack_bf162(even, odd);
      sums.plain[r] += even + odd;
      sums.rounded[r] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
      probabilities[j / 2][j % 2 * 2 + r] = pair;
    }
  }
}

// For the other math warpgroup. panel: shared address.
__device__ __forceinline__ void store_probabilities(const Probabilities& probabilities, std::uint32_t panel, int warp,
                                                    int lane) {
  const std::uint32_t first_chunk = panel + tile::chunk_offset(warp * kRowsPerWarp + lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < kPvSteps; ++step) {
    const std::uint32_t(&own)[4] = probabilities[step];
    ptx::stmatrix_x4(first_chunk ^ (step * 2 * tile::kChunkBytes), own[0], own[1], own[2], own[3]);
  }
}

}  // namespace chiasma::sm90_sparse_bf16
