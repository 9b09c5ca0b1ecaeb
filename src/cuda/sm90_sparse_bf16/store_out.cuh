// Stage store_out: normalised results of a piece to the caller's tensor or, for a part of a row, to scratch memory.
#pragma once

#include "api/problem.h"
#include "cuda/sm90_sparse_bf16/accumulate_pv.cuh"
#include "cuda/tile/transpose_quad.cuh"

namespace chiasma::sm90_sparse_bf16 {

// One of a thread's two heads: the group's 256 columns, which start at `columns`. All lanes; exists: whether to store.
template <bool kVectors>
__device__ __forceinline__ void store_head(const Output& output, bf16_t* columns, float multiplier, int r, int lane,
                                           bool exists) {
#pragma unroll
  for (int j = 0; j < kColumnsPerGroup / 8; j += 4) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (j + i) * 4 + 2 * r;
      words[i] = ptx::pack_bf162(output[at] * multiplier, output[at + 1] * multiplier);
    }
    if constexpr (kVectors) {
      const uint4 packed = tile::transpose_quad(words[0], words[1], words[2], words[3], lane);
      if (exists) *reinterpret_cast<uint4*>(columns + (j + lane % 4) * 8) = packed;
    } else {
#pragma unroll
      for (int i = 0; i < 4 && exists; ++i) {
        bf16_t* to = columns + (j + i) * 8 + lane % 4 * 2;
        to[0].bits = static_cast<std::uint16_t>(words[i]);
        to[1].bits = static_cast<std::uint16_t>(words[i] >> 16);
      }
    }
  }
}

__device__ __forceinline__ void store_head(const Output& output, float* columns, float multiplier, int r, int lane) {
#pragma unroll
  for (int j = 0; j < kColumnsPerGroup / 8; ++j) {
    const int at = j * 4 + 2 * r;
    *reinterpret_cast<float2*>(columns + j * 8 + lane % 4 * 2) =
        make_float2(output[at] * multiplier, output[at + 1] * multiplier);
  }
}

}  // namespace chiasma::sm90_sparse_bf16
