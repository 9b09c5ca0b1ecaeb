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
  __device__ void store(float* to) const {
    reinterpret_cast<float4*>(to)[0] = make_float4(value[0], value[1], value[2], value[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(value[4], value[5], value[6], value[7]);
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
      if (first_head + row >= problem.h_q) continue;
      const LaneColumns<Config::kHeads> columns(output, j, c, note.multiplier[row]);
      if (out != nullptr) {
        columns.store(out + row * problem.out_stride_h + first_column);
      } else {
        columns.store(part + row * kValueDim + first_column);
      }
    }
  }
}

}  // namespace chiasma::sm90_sparse_fp8_direct
