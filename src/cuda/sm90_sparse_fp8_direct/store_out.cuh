// Stage store_out: normalised results of a piece to the caller's tensor or, for a part of a row, to scratch memory. A
// lane has eight neighbouring columns of every one of its heads.
#pragma once

#include "api/problem.h"
#include "cuda/ptx/global_store.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_direct/accumulate_pv.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// In place of a multiplier: no token counts, and what was accumulated, be it NaN, does not either.
inline constexpr float kNothingValid = -0.0f;

template <int kHeads>
struct LaneColumns {
  float value[kColumnsPerThread];

  // Head 8 j + 2 (lane % 4) + c.
  __device__ LaneColumns(const OutputTiles<kHeads>& output, int j, int c, float multiplier) {
    const bool is_empty = __float_as_uint(multiplier) == __float_as_uint(kNothingValid);
#pragma unroll
    for (int column = 0; column < kColumnsPerThread; ++column) {
      value[column] = is_empty ? 0.0f : output[column / 2][4 * j + column % 2 * 2 + c] * multiplier;
    }
  }
  __device__ void store(bf16_t* to) const {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(ptx::pack_bf162(value[0], value[1]), ptx::pack_bf162(value[2], value[3]),
                   ptx::pack_bf162(value[4], value[5]), ptx::pack_bf162(value[6], value[7]));
  }
  // The same to any address.
  __device__ void store_by_numbers(bf16_t* to) const {
#pragma unroll
    for (int i = 0; i < kColumnsPerThread; i += 2) {
      const std::uint32_t pair = ptx::pack_bf162(value[i], value[i + 1]);
      to[i].bits = static_cast<std::uint16_t>(pair);
      to[i + 1].bits = static_cast<std::uint16_t>(pair >> 16);
    }
  }
  // To where the lane's own columns go, once lanes have swapped halves.
  __device__ void store(float* to) const {
    const int first = has_right_half() ? -kHalf : 0;
    ptx::store_global_16(to + first, value[0], value[1], value[2], value[3]);
    ptx::store_global_16(to + first + kColumnsPerThread, value[4], value[5], value[6], value[7]);
  }

  // PERF: a lane's eight floats are one sector of 32 bytes, and stores take 16. Lanes l and l + 4 have neighbouring
  // sectors; after this each holds a half of both, so that a warp's store fills whole ones (H200, 2026-11-30: 128 KB of
  // parts in 0.8 us instead of 3 to 7). The whole warp.
  __device__ void swap_halves() {
    const bool is_right = has_right_half();
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float got = __shfl_xor_sync(0xffffffffu, is_right ? value[i] : value[i + kHalf], 4);
      (is_right ? value[i] : value[i + kHalf]) = got;
    }
  }

 private:
  static constexpr int kHalf = kColumnsPerThread / 2;
  static __device__ bool has_right_half() {
    return (ptx::lane_id_here() & 4) != 0;
  }
};

// For every row of results that the lane has a share in: visit(row, columns). PERF: registers are full of accumulators
// while blocks are worked on; nothing of this may be kept from before.
template <typename Config, typename Visit>
__device__ __forceinline__ void visit_rows(const OutputTiles<Config::kHeads>& output,
                                           const float (&multiplier)[Config::kHeads], int lane, Visit&& visit) {
#pragma unroll
  for (int j = 0; j < Config::kHeads / 8; ++j) {
    const float2 by = *reinterpret_cast<const float2*>(&multiplier[8 * j + lane % 4 * 2]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      LaneColumns<Config::kHeads> columns(output, j, c, c == 0 ? by.x : by.y);
      visit(8 * j + lane % 4 * 2 + c, columns);
    }
  }
}

// out, part: of the thread block's first head. num_heads: of its heads, those that exist.
template <typename Config>
__device__ __forceinline__ void store_out(const OutputTiles<Config::kHeads>& output,
                                          const float (&multiplier)[Config::kHeads], bf16_t* out,
                                          std::int64_t out_stride, int num_heads, int warp_column) {
  const int lane = ptx::lane_id_here();
  bf16_t* own = out + warp_column + lane / 4 * kColumnsPerThread;
  visit_rows<Config>(output, multiplier, lane, [&](int row, const LaneColumns<Config::kHeads>& columns) {
    if (row >= num_heads) return;
    if constexpr (Config::kVectors) {
      columns.store(own + row * out_stride);
    } else {
      columns.store_by_numbers(own + row * out_stride);
    }
  });
}
template <typename Config>
__device__ __forceinline__ void store_part(const OutputTiles<Config::kHeads>& output,
                                           const float (&multiplier)[Config::kHeads], float* part, int num_heads,
                                           int warp_column) {
  const int lane = ptx::lane_id_here();
  float* own = part + warp_column + lane / 4 * kColumnsPerThread;
  visit_rows<Config>(output, multiplier, lane, [&](int row, LaneColumns<Config::kHeads>& columns) {
    columns.swap_halves();
    if (row < num_heads) columns.store(own + row * kValueDim);
  });
}

}  // namespace chiasma::sm90_sparse_fp8_direct
