// Stage store_out: normalised results of a piece to the caller's tensors or, for a part of a row, to scratch memory.
#pragma once

#include <cmath>
#include <numbers>

#include "cuda/ptx/convert.cuh"
#include "cuda/sm90_sparse_fp8/accumulate_pv.cuh"
#include "cuda/sm90_sparse_fp8/softmax_step.cuh"
#include "cuda/sm90_sparse_fp8/work_list.cuh"
#include "cuda/tile/sink.cuh"
#include "cuda/tile/transpose_quad.cuh"

namespace chiasma::sm90_sparse_fp8 {

// Natural-log lse and the multiplier that turns accumulators into results, for one head.
struct Normalization {
  float lse;
  float multiplier;
};

__device__ __forceinline__ Normalization normalize(float reference, float sum, bool any_valid) {
  // A query of NaN makes sum and accumulators NaN even where no token counts.
  if (!any_valid || (reference == -INFINITY && sum == 0.0f)) return {-INFINITY, 0.0f};
  return {(reference + log2f(sum)) * std::numbers::ln2_v<float>, __fdividef(1.0f, sum)};
}

// One of the thread's two heads (r = 0 or 1): this warpgroup's 256 columns, which start at `columns`.
__device__ __forceinline__ void store_row_bf16(const OutputTile (&output)[kOutputTiles], bf16_t* columns,
                                               float multiplier, bool is_empty, int r, int lane, bool store) {
#pragma unroll
  for (int tile = 0; tile < kOutputTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < kTileColumns / 8; j += 4) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (j + i) * 4 + 2 * r;
        // Of an empty row what was accumulated does not count, be it NaN.
        words[i] = is_empty ? 0 : ptx::pack_bf162(output[tile][at] * multiplier, output[tile][at + 1] * multiplier);
      }
      const uint4 packed = tile::transpose_quad(words[0], words[1], words[2], words[3], lane);
      if (store) *reinterpret_cast<uint4*>(columns + tile * kTileColumns + (j + lane % 4) * 8) = packed;
    }
  }
}

__device__ __forceinline__ void store_row_float(const OutputTile (&output)[kOutputTiles], float* columns,
                                                float multiplier, int r, int lane) {
#pragma unroll
  for (int tile = 0; tile < kOutputTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < kTileColumns / 8; ++j) {
      const int at = j * 4 + 2 * r;
      *reinterpret_cast<float2*>(columns + tile * kTileColumns + j * 8 + lane % 4 * 2) =
          make_float2(output[tile][at] * multiplier, output[tile][at + 1] * multiplier);
    }
  }
}

// Sums of weights lie where P was: of what a warpgroup's threads have as it is, and of what they have times 2^64.
__device__ __forceinline__ float2& row_sum(SmemPlan& smem, int warpgroup, int row) {
  return reinterpret_cast<float2*>(smem.p)[warpgroup * kHeadsPerCta + row];
}
// At least 2^-121, if anything was summed.
__device__ __forceinline__ float total_sum(SmemPlan& smem, int row) {
  const float2 first = row_sum(smem, 0, row), second = row_sum(smem, 1, row);
  const float plain = first.x + second.x, low = first.y + second.y;
  return plain >= kLeastPlain ? plain + low / kLow : (plain * kLow + low) / kLow;
}

__device__ __forceinline__ void store_out(const OutputTile (&output)[kOutputTiles], const Params& params,
                                          SmemPlan& smem, const SoftmaxState& state, const Work& work, int first_head,
                                          int warpgroup, int warp, int lane) {
  const DecodeProblem& problem = params.problem;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + 8 * r;
    const int head = first_head + row;
    const bool exists = head < problem.h_q;
    Normalization result = normalize(state.reference[r], total_sum(smem, row), smem.any_valid != 0);
    const bool writes_lse = exists && warpgroup == 0 && lane % 4 == 0;
    if (work.piece.slot == tile::Piece::kWholeRow) {
      if (writes_lse) {
        problem.lse[work.request * problem.lse_stride_b + work.query_token * problem.lse_stride_s +
                    head * problem.lse_stride_h] = result.lse;
      }
      if (exists && problem.attn_sink != nullptr) {
        result.multiplier *= tile::sink_multiplier(result.lse, problem.attn_sink[head * problem.attn_sink_stride]);
      }
      bf16_t* columns = problem.out + work.request * problem.out_stride_b + work.query_token * problem.out_stride_s +
                        head * problem.out_stride_h + warpgroup * kColumnsPerWarpgroup;
      store_row_bf16(output, columns, result.multiplier, result.lse == -INFINITY, r, lane, exists);
    } else if (exists) {
      const std::int64_t at = work.piece.slot * problem.h_q + head;
      if (writes_lse) params.part_lse[at] = result.lse;
      if (result.lse != -INFINITY) {
        store_row_float(output, params.part_out + at * kValueDim + warpgroup * kColumnsPerWarpgroup, result.multiplier,
                        r, lane);
      }
    }
  }
}

}  // namespace chiasma::sm90_sparse_fp8
