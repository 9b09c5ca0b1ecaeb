// Stage load_q: the query of a piece from memory, divided by a power of two per head, into the K-major panels: f16
// against codes, bf16 against the row's bf16 values. By all math warps. Heads beyond h_q become zeros.
//
// LAYOUT: QK may take the contraction in any order, if both operands agree. Of a chunk of 16 codes lane t of a quad has
// codes 4 t to 4 t + 3, where the tensor cores have 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a step; so words 0 to 7 of 16
// query columns (two chunks) are stored as 0, 2, 4, 6 and 1, 3, 5, 7. bf16 values need no permutation.
#pragma once

#include <cfloat>
#include <cmath>
#include <numbers>

#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"
#include "cuda/sm90_sparse_fp8_direct/work_list.cuh"
#include "cuda/tile/bf16_words.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// A row of the query is chunks of 16 bytes. Lane l has chunks 2 l, 2 l + 1 and, of rows of 576 columns, if it is among
// the first eight, chunk 64 + l. The last eight chunks may lie in a tensor of their own.
inline constexpr int kRopeLanes = kRopeDim / tile::kChunkColumns;
template <typename Config>
inline constexpr int kLaneChunks = Config::kTraits.key_dim() * 2 / tile::kChunkBytes > 2 * kWarpThreads ? 3 : 2;
template <typename Config>
using LaneChunks = uint4[kLaneChunks<Config>];

// PERF: a condition for each load, not one branch around a row's, so that all rows' loads are on their way together (16
// requests of 128 heads: 33.0 instead of 34.5 us, H200, 2026-12-01).
__device__ __forceinline__ uint4 load_chunk(const bf16_t* row, int chunk, bool exists) {
  return exists ? __ldg(reinterpret_cast<const uint4*>(row) + chunk) : make_uint4(0, 0, 0, 0);
}

// Biased exponent of the row's largest number. All lanes get it.
template <int kChunks>
__device__ __forceinline__ std::uint32_t query_exponent(const uint4 (&chunks)[kChunks]) {
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

// Two neighbouring chunks of columns that meet codes.
__device__ __forceinline__ void store_code_columns(std::uint8_t* panel, int row, int first_chunk, const uint4& left,
                                                   const uint4& right, float inverse) {
  *reinterpret_cast<uint4*>(panel + tile::chunk_offset(row, first_chunk)) =
      tile::scaled_half8(make_uint4(left.x, left.z, right.x, right.z), inverse);
  *reinterpret_cast<uint4*>(panel + tile::chunk_offset(row, first_chunk + 1)) =
      tile::scaled_half8(make_uint4(left.y, left.w, right.y, right.w), inverse);
}

// A lane's own chunk, where the neighbouring lane has the other of the two. All lanes.
__device__ __forceinline__ void store_shared_code_columns(std::uint8_t* panel, int row, int lane, const uint4& own,
                                                          float inverse) {
  const bool is_right = lane % 2 == 1;
  const std::uint32_t first = __shfl_xor_sync(0xffffffffu, is_right ? own.x : own.y, 1);
  const std::uint32_t second = __shfl_xor_sync(0xffffffffu, is_right ? own.z : own.w, 1);
  if (lane >= kRopeLanes) return;
  const uint4 words = is_right ? make_uint4(first, second, own.y, own.w) : make_uint4(own.x, own.z, first, second);
  *reinterpret_cast<uint4*>(panel + tile::chunk_offset(row, lane)) = tile::scaled_half8(words, inverse);
}

template <typename Config, typename Smem>
__device__ __forceinline__ void store_row(const LaneChunks<Config>& chunks, Smem& smem, float sm_scale, int row,
                                          int lane) {
  const std::uint32_t exponent = query_exponent(chunks);
  const float inverse = __uint_as_float((254u + kQueryTargetExponent - exponent) << 23);
  constexpr int kLanesPerPanel = tile::kPanelColumns / tile::kChunkColumns / 2;
  std::uint8_t* panel = smem.q[lane / kLanesPerPanel];
  const int first_chunk = lane % kLanesPerPanel * 2;
  if (Config::kCodePanels >= kWarpThreads / kLanesPerPanel || lane / kLanesPerPanel < Config::kCodePanels) {
    store_code_columns(panel, row, first_chunk, chunks[0], chunks[1], inverse);
  } else {
    *reinterpret_cast<uint4*>(panel + tile::chunk_offset(row, first_chunk)) = scaled_bf168(chunks[0], inverse);
    *reinterpret_cast<uint4*>(panel + tile::chunk_offset(row, first_chunk + 1)) = scaled_bf168(chunks[1], inverse);
  }
  if constexpr (kLaneChunks<Config> == 3) {
    std::uint8_t* last_panel = smem.q[Config::kKeyPanels - 1];
    if constexpr (Config::kBf16Panels == 0) {
      store_shared_code_columns(last_panel, row, lane, chunks[2], inverse);
    } else if (lane < kRopeLanes) {
      *reinterpret_cast<uint4*>(last_panel + tile::chunk_offset(row, lane)) = scaled_bf168(chunks[2], inverse);
    }
  }
  const float factor =
      sm_scale * std::numbers::log2e_v<float> * __uint_as_float((exponent - kQueryTargetExponent) << 23);
  if (lane == 0) smem.head[row] = {fminf(fmaxf(factor, -FLT_MAX), FLT_MAX), 0.0f};
}

// The same from any address.
__device__ __forceinline__ uint4 load_chunk_by_numbers(const bf16_t* row, int chunk, bool exists) {
  if (!exists) return make_uint4(0, 0, 0, 0);
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto* pair = reinterpret_cast<const std::uint16_t*>(row) + chunk * tile::kChunkColumns + 2 * i;
    words[i] = __ldg(pair) | static_cast<std::uint32_t>(__ldg(pair + 1)) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp's rows of the query as one of its lanes sees them.
template <typename Config>
struct LaneRows {
  static constexpr bool kRopeIsThird = kLaneChunks<Config> == 3;
  const bf16_t* first;  // of the lane's first two chunks
  std::int64_t first_stride;
  const bf16_t* rope;  // of the third
  std::int64_t rope_stride;
  int num_rows, lane;

  __device__ LaneRows(const DecodeProblem& problem, const Work& work, int head, int lane_id)
      : first(query_of(problem, work, head)),
        first_stride(problem.q_stride_h),
        rope(query_rope_of(problem, work, head)),
        rope_stride(problem.q_rope_stride_h),
        num_rows(problem.h_q - head),
        lane(lane_id) {
    if constexpr (!kRopeIsThird) {
      // The last lanes' chunks are the rotary ones.
      constexpr int kFirstRopeLane = kWarpThreads - kRopeLanes / 2;
      if (lane < kFirstRopeLane) return;
      first = rope - (Config::kTraits.key_dim() - kRopeDim);
      first_stride = rope_stride;
    }
  }

  template <typename Load>
  __device__ __forceinline__ void load_first(LaneChunks<Config>& chunks, int row, Load&& load) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) chunks[n] = load(first + row * first_stride, 2 * lane + n, row < num_rows);
  }
  template <typename Load>
  __device__ __forceinline__ void load_third(LaneChunks<Config>& chunks, int row, Load&& load) const {
    if constexpr (kRopeIsThird) {
      chunks[2] = load(rope + row * rope_stride, lane, row < num_rows && lane < kRopeLanes);
    }
  }
};

// warp: among all math warps. smem: has panels q and what is known of each head.
template <typename Config, typename Smem>
__device__ __forceinline__ void load_q(const DecodeProblem& problem, Smem& smem, const Work& work, int first_head,
                                       int warp, int lane) {
  constexpr int kRowsPerWarp = Config::kHeads / kMathWarps;
  const int first = warp * kRowsPerWarp;
  const LaneRows<Config> rows(problem, work, first_head + first, lane);
  // All loads on their way together. PERF: one pointer at a time, since registers are few.
  constexpr auto kLoad = Config::kVectors ? load_chunk : load_chunk_by_numbers;
  LaneChunks<Config> chunks[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) rows.load_first(chunks[i], i, kLoad);
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) rows.load_third(chunks[i], i, kLoad);
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) store_row<Config>(chunks[i], smem, problem.sm_scale, first + i, lane);
}

}  // namespace chiasma::sm90_sparse_fp8_direct
