// Stage store_out: normalised results of a piece to the caller's tensor or, for a part of a row, to scratch memory. A
// lane has eight neighbouring columns of every one of its heads.
#pragma once

#include "api/problem.h"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_seesaw/accumulate_pv.cuh"

namespace chiasma::sm90_sparse_fp8_seesaw {

template <int kHeads>
struct LaneColumns {
  float value[kColumnsPerThread];

  // Head 8 j + 2 (lane % 4) + c.
  __device__ LaneColumns(const OutputTiles<kHeads>& output, int j, int c, float multiplier) {
#pragma unroll
    for (int column = 0; column < kColumnsPerThread; ++column) {
      value[column] = output[column / 2][4 * j + column % 2 * 2 + c] * multiplier;
    }
  }
  __device__ void store(bf16_t* to) const {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(ptx::pack_bf162(value[0], value[1]), ptx::pack_bf162(value[2], value[3]),
                   ptx::pack_bf162(value[4], value[5]), ptx::pack_bf162(value[6], value[7]));
  }
  // PERF: neighbours (lanes that differ in bit 2) swap halves, so that every store of a warp writes whole sectors. All
  // lanes of a warp.
  __device__ void store(float* to, int lane, bool exists) const {
    constexpr int kHalf = kColumnsPerThread / 2;
    const bool is_right = (lane & 4) != 0;
    float swapped[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      swapped[i] = __shfl_xor_sync(0xffffffffu, is_right ? value[i] : value[i + kHalf], 4);
    }
    if (!exists) return;
    const float4 own = is_right ? make_float4(value[4], value[5], value[6], value[7])
                                : make_float4(value[0], value[1], value[2], value[3]);
    const float4 other = make_float4(swapped[0], swapped[1], swapped[2], swapped[3]);
    float* pair = is_right ? to - kHalf : to;
    *reinterpret_cast<float4*>(pair) = is_right ? other : own;
    *reinterpret_cast<float4*>(pair + kColumnsPerThread) = is_right ? own : other;
  }
};

// To `out` or, if that is null, to `part`; both of the thread block's first head.
template <typename Config>
__device__ __forceinline__ void store_out(const OutputTiles<Config::kHeads>& output,
                                          const float (&multiplier)[Config::kHeads], bf16_t* out,
                                          std::int64_t out_stride, float* part, int num_heads, int warp_column) {
  // PERF: registers are full of accumulators while blocks are worked on; nothing of this may be kept from before.
  const int lane = ptx::lane_id_here();
  const int first_column = warp_column + lane / 4 * kColumnsPerThread;
#pragma unroll
  for (int j = 0; j < Config::kHeads / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * j + lane % 4 * 2 + c;
      const LaneColumns<Config::kHeads> columns(output, j, c, multiplier[row]);
      if (out == nullptr) {
        columns.store(part + row * kValueDim + first_column, lane, row < num_heads);
      } else if (row < num_heads) {
        columns.store(out + row * out_stride + first_column);
      }
    }
  }
}

}  // namespace chiasma::sm90_sparse_fp8_seesaw
