// Stage load_q: the query of a piece from memory, divided by a power of two per head, into the K-major panels: f16
// against codes, bf16 against RoPE values. By all math warps. Heads beyond h_q become zeros.
//
// LAYOUT: QK may take the contraction in any order, if both operands agree. Of a chunk of 16 codes lane t of a quad has
// codes 4 t to 4 t + 3, where the tensor cores have 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a step; so words 0 to 7 of 16
// query columns (two chunks) are stored as 0, 2, 4, 6 and 1, 3, 5, 7. RoPE values need no permutation.
#pragma once

#include <cfloat>
#include <cmath>

#include "cuda/sm90_sparse_fp8_seesaw/smem_plan.h"
#include "cuda/sm90_sparse_fp8_seesaw/work_list.cuh"
#include "cuda/tile/bf16_words.cuh"

namespace chiasma::sm90_sparse_fp8_seesaw {

inline constexpr float kLog2E = 1.4426950408889634f;

// Eight heads of a warp at a time: lane l has head l / 4 and in each panel the two chunks 2 (l % 4) and + 1.
inline constexpr int kQueryGroup = 8;
struct ChunkPair {
  uint4 first, second;
};
using QueryChunks = ChunkPair[kKeyPanels];

template <typename Config>
__device__ __forceinline__ uint4* query_chunk(SmemPlan<Config>& smem, int panel, int row, int chunk) {
  return reinterpret_cast<uint4*>(&smem.q[panel][tile::chunk_offset(row, chunk)]);
}

// Biased exponent of the head's largest number. All four lanes of a head get it.
__device__ __forceinline__ std::uint32_t query_exponent(const QueryChunks& chunks) {
  std::uint32_t packed = 0;
#pragma unroll
  for (const ChunkPair& pair : chunks) {
    packed = __vmaxu2(packed, __vmaxu2(tile::packed_magnitude(pair.first), tile::packed_magnitude(pair.second)));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) packed = __vmaxu2(packed, __shfl_xor_sync(0xffffffffu, packed, step));
  // Below 2^-100 the inverse would leave float32's range; such queries score 0 anyway. With a NaN or infinity among the
  // numbers the head's results are NaN whatever the others become.
  return min(max(tile::larger_half(packed) >> 7, 127u - 100u), 254u);
}

__device__ __forceinline__ std::uint32_t scaled_bf162(std::uint32_t word, float factor) {
  return ptx::pack_bf162(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xffff0000u) * factor);
}
__device__ __forceinline__ uint4 scaled_bf168(const uint4& words, float factor) {
  return make_uint4(scaled_bf162(words.x, factor), scaled_bf162(words.y, factor), scaled_bf162(words.z, factor),
                    scaled_bf162(words.w, factor));
}

// warp: among all math warps.
template <typename Config>
__device__ __forceinline__ void load_q(const DecodeProblem& problem, SmemPlan<Config>& smem, const Work& work,
                                       int first_head, int warp, int lane) {
#pragma unroll 1
  for (int group = warp; group < Config::kHeads / kQueryGroup; group += kMathWarps) {
    const int row = group * kQueryGroup + lane / 4;
    const int chunk = lane % 4 * 2;
    const bool exists = first_head + row < problem.h_q;
    const auto* query = reinterpret_cast<const uint4*>(query_of(problem, work, first_head) + row * problem.q_stride_h);
    QueryChunks chunks;
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      chunks[panel] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
      if (exists) chunks[panel] = {__ldg(query + panel * 8 + chunk), __ldg(query + panel * 8 + chunk + 1)};
    }
    const std::uint32_t exponent = query_exponent(chunks);
    const float inverse = __uint_as_float((254u + kQueryTargetExponent - exponent) << 23);
#pragma unroll
    for (int panel = 0; panel < kCodePanels; ++panel) {
      const auto& [a, b] = chunks[panel];
      *query_chunk(smem, panel, row, chunk) = tile::scaled_half8(make_uint4(a.x, a.z, b.x, b.z), inverse);
      *query_chunk(smem, panel, row, chunk + 1) = tile::scaled_half8(make_uint4(a.y, a.w, b.y, b.w), inverse);
    }
    *query_chunk(smem, kRopePanel, row, chunk) = scaled_bf168(chunks[kRopePanel].first, inverse);
    *query_chunk(smem, kRopePanel, row, chunk + 1) = scaled_bf168(chunks[kRopePanel].second, inverse);
    const float factor = problem.sm_scale * kLog2E * __uint_as_float((exponent - kQueryTargetExponent) << 23);
    if (lane % 4 == 0) smem.head[row] = {fminf(fmaxf(factor, -FLT_MAX), FLT_MAX), 0.0f};
  }
}

}  // namespace chiasma::sm90_sparse_fp8_seesaw
