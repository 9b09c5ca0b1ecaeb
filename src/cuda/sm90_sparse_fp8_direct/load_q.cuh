// Stage load_q: the query of a piece from memory, divided by a power of two per head, into the K-major panels: f16
// against codes, bf16 against RoPE values. By all math warps. Heads beyond h_q become zeros.
//
// LAYOUT: QK may take the contraction in any order, if both operands agree. Of a chunk of 16 codes lane t of a quad has
// codes 4 t to 4 t + 3, where the tensor cores have 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a step; so words 0 to 7 of 16
// query columns (two chunks) are stored as 0, 2, 4, 6 and 1, 3, 5, 7. RoPE values need no permutation.
#pragma once

#include <cfloat>
#include <cmath>
#include <numbers>

#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"
#include "cuda/sm90_sparse_fp8_direct/work_list.cuh"
#include "cuda/tile/bf16_words.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// A row of the query is 64 chunks of 16 bytes and 8 of RoPE columns: lane l has chunks 2 l, 2 l + 1 and, if it is among
// the first eight, RoPE chunk l.
inline constexpr int kLaneChunks = 3;
inline constexpr int kRopeLanes = kRopeDim / tile::kChunkColumns;
static_assert((kLaneChunks - 1) * kWarpThreads + kRopeLanes == v32::kKeyDim / tile::kChunkColumns);
using LaneChunks = uint4[kLaneChunks];

// PERF: a condition for each load, not one branch around a row's, so that all rows' loads are on their way together (16
// requests of 128 heads: 33.0 instead of 34.5 us, H200, 2026-12-01).
__device__ __forceinline__ uint4 load_chunk(const bf16_t* row, int chunk, bool exists) {
  return exists ? __ldg(reinterpret_cast<const uint4*>(row) + chunk) : make_uint4(0, 0, 0, 0);
}

// Biased exponent of the row's largest number. All lanes get it.
__device__ __forceinline__ std::uint32_t query_exponent(const LaneChunks& chunks) {
  std::uint32_t packed = 0;
#pragma unroll
  for (const uint4& chunk : chunks) packed = __vmaxu2(packed, tile::packed_magnitude(chunk));
  // Below 2^-100 the inverse would leave float32's range; such queries score 0 anyway. With a NaN or infinity among the
  // numbers the head's results are NaN whatever the others become.
  return min(max(__reduce_max_sync(0xffffffffu, tile::larger_half(packed)) >> 7, 127u - 100u), 254u);
}

__device__ __forceinline__ std::uint32_t scaled_bf162(std::uint32_t word, float factor) {
  return ptx::pack_bf162(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xffff0000u) * factor);
}
__device__ __forceinline__ uint4 scaled_bf168(const uint4& words, float factor) {
  return make_uint4(scaled_bf162(words.x, factor), scaled_bf162(words.y, factor), scaled_bf162(words.z, factor),
                    scaled_bf162(words.w, factor));
}

template <typename Config>
__device__ __forceinline__ void store_row(const LaneChunks& chunks, SmemPlan<Config>& smem, float sm_scale, int row,
                                          int lane) {
  const std::uint32_t exponent = query_exponent(chunks);
  const float inverse = __uint_as_float((254u + kQueryTargetExponent - exponent) << 23);
  const uint4& left = chunks[0];
  const uint4& right = chunks[1];
  std::uint8_t* panel = smem.q[lane / 4];
  *reinterpret_cast<uint4*>(panel + tile::chunk_offset(row, lane % 4 * 2)) =
      tile::scaled_half8(make_uint4(left.x, left.z, right.x, right.z), inverse);
  *reinterpret_cast<uint4*>(panel + tile::chunk_offset(row, lane % 4 * 2 + 1)) =
      tile::scaled_half8(make_uint4(left.y, left.w, right.y, right.w), inverse);
  if (lane < kRopeLanes) {
    *reinterpret_cast<uint4*>(&smem.q[kRopePanel][tile::chunk_offset(row, lane)]) =
        scaled_bf168(chunks[kLaneChunks - 1], inverse);
  }
  const float factor =
      sm_scale * std::numbers::log2e_v<float> * __uint_as_float((exponent - kQueryTargetExponent) << 23);
  if (lane == 0) smem.head[row] = {fminf(fmaxf(factor, -FLT_MAX), FLT_MAX), 0.0f};
}

// warp: among all math warps.
template <typename Config>
__device__ __forceinline__ void load_q(const DecodeProblem& problem, SmemPlan<Config>& smem, const Work& work,
                                       int first_head, int warp, int lane) {
  constexpr int kRowsPerWarp = Config::kHeads / kMathWarps;
  const int first = warp * kRowsPerWarp;
  const int num_rows = problem.h_q - (first_head + first);
  // PERF: all loads on their way together; one pointer at a time, since registers are few.
  LaneChunks chunks[kRowsPerWarp];
  const bf16_t* nope = query_of(problem, work, first_head + first);
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
#pragma unroll
    for (int n = 0; n + 1 < kLaneChunks; ++n) {
      chunks[i][n] = load_chunk(nope + i * problem.q_stride_h, 2 * lane + n, i < num_rows);
    }
  }
  const bf16_t* rope = query_rope_of(problem, work, first_head + first);
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    chunks[i][kLaneChunks - 1] =
        load_chunk(rope + i * problem.q_rope_stride_h, lane, i < num_rows && lane < kRopeLanes);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) store_row(chunks[i], smem, problem.sm_scale, first + i, lane);
}

}  // namespace chiasma::sm90_sparse_fp8_direct
