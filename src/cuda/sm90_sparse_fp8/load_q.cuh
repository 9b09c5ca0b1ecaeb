// Stage load_q: the query of a piece, as f16 divided by a power of two per head, into the K-major panels. Done by the
// math warps, eight heads each; heads beyond h_q become zeros.
#pragma once

#include <cmath>

#include "cuda/sm90_sparse_fp8/smem_plan.h"
#include "cuda/sm90_sparse_fp8/work_list.cuh"
#include "cuda/tile/bf16_words.cuh"

namespace chiasma::sm90_sparse_fp8 {

inline constexpr int kQueryChunks = v32::kKeyDim / tile::kChunkColumns;  // 72 of 16 bytes
inline constexpr int kHeadsPerWarp = kHeadsPerCta / (kMathThreads / kWarpThreads);

// One head of a lane: chunks lane, 32 + lane and, in the first lanes, 64 + lane.
using QueryChunks = uint4[3];

__device__ __forceinline__ void gather_q(QueryChunks& chunks, const DecodeProblem& problem, const bf16_t* token,
                                         int head, int lane) {
  chunks[0] = chunks[1] = chunks[2] = make_uint4(0, 0, 0, 0);
  if (head >= problem.h_q) return;
  const uint4* row = reinterpret_cast<const uint4*>(token + head * problem.q_stride_h);
  chunks[0] = __ldg(row + lane);
  chunks[1] = __ldg(row + 32 + lane);
  if (lane < kQueryChunks - 64) chunks[2] = __ldg(row + 64 + lane);
}

// The sign of sm_scale goes into the query, so that a head's scale is positive and the largest score belongs to the
// largest dot product; so does a scale of 0.
__device__ __forceinline__ void convert_q(const QueryChunks& chunks, SmemPlan& smem, float sm_scale, int row,
                                          int lane) {
  const std::uint32_t packed = __vmaxu2(tile::packed_magnitude(chunks[0]),
                                        __vmaxu2(tile::packed_magnitude(chunks[1]), tile::packed_magnitude(chunks[2])));
  const std::uint32_t most = __reduce_max_sync(0xffffffffu, tile::larger_half(packed));
  // Below 2^-100 the factor itself would leave float32's range; such queries score 0 anyway. With a NaN or infinity
  // among the numbers the head's results are NaN whatever the others become.
  const std::uint32_t exponent = min(max(most >> 7, 127u - 100u), 254u);
  const float magnitude = __uint_as_float((254u + kQueryTargetExponent - exponent) << 23);
  const float factor = sm_scale == 0.0f ? 0.0f : copysignf(magnitude, sm_scale);
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    const int chunk = part * 32 + lane;
    if (chunk >= kQueryChunks) continue;
    *reinterpret_cast<uint4*>(&smem.q[chunk / 8][tile::chunk_offset(row, chunk % 8)]) =
        tile::scaled_half8(chunks[part], factor);
  }
  if (lane == 0) smem.query_exponent[row] = static_cast<std::uint8_t>(exponent - kQueryTargetExponent);
}

__device__ __forceinline__ void load_q(const DecodeProblem& problem, SmemPlan& smem, const Work& work, int first_head,
                                       int math_warp, int lane) {
  const bf16_t* token = problem.q + work.request * problem.q_stride_b + work.query_token * problem.q_stride_s;
  const int first_row = math_warp * kHeadsPerWarp;
  // All loads first: the accumulators' registers are free here, and one trip to memory is enough.
  QueryChunks chunks[kHeadsPerWarp];
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) gather_q(chunks[i], problem, token, first_head + first_row + i, lane);
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) convert_q(chunks[i], smem, problem.sm_scale, first_row + i, lane);
}

}  // namespace chiasma::sm90_sparse_fp8
