// Stage store_out: normalised results of a piece to the caller's tensor or, for a part of a row, to scratch memory. A
// lane has eight neighbouring columns of every one of its heads.
#pragma once

#include "api/problem.h"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_direct/accumulate_pv.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

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
  // Of the lane's own columns, once lanes have swapped halves.
  __device__ void store(float* to) const {
    const int first = has_right_half() ? -kHalf : 0;
    *reinterpret_cast<float4*>(to + first) = make_float4(value[0], value[1], value[2], value[3]);
    *reinterpret_cast<float4*>(to + first + kColumnsPerThread) = make_float4(value[4], value[5], value[6], value[7]);
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

template <typename Config>
__device__ __forceinline__ void store_out(const OutputTiles<Config::kHeads>& output, const DecodeProblem& problem,
                                          const Note<Config>& note, int first_head, int warp_column) {
  // PERF: registers are full of accumulators while blocks are worked on; nothing of this may be kept from before.
  const int lane = ptx::lane_id_here();
  const int first_column = warp_column + lane / 4 * kColumnsPerThread;
  bf16_t* out = note.out;
  float* part = note.part_out;
#pragma unroll
  for (int j = 0; j < Config::kHeads / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * j + lane % 4 * 2 + c;
      LaneColumns<Config::kHeads> columns(output, j, c, note.multiplier[row]);
      if (out == nullptr) columns.swap_halves();
      if (first_head + row >= problem.h_q) continue;
      if (out != nullptr) {
        columns.store(out + row * problem.out_stride_h + first_column);
      } else {
        columns.store(part + row * kValueDim + first_column);
      }
    }
  }
}

}  // namespace chiasma::sm90_sparse_fp8_direct
