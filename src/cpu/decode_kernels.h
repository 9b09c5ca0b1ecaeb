// The stages of the CPU decode, one function each, vectorised with Highway and dispatched at run time to the best
// instruction set of the machine. decode.cpp strings them together; nothing here knows about threads or requests.
//
// A stage works on one group of at most kHeadGroup heads: what a group needs beside the tile then fits the L2 cache
// together with the tile, which all groups share.
//
// Layouts (all float32, 64-byte aligned, LANES = the instruction set's vector width, at most kMaxLanes):
//   queries        [panel of 2 * LANES heads][dim][2 * LANES]: the heads stand side by side, so that scores for several
//                  heads come out as one vector and no stage ever transposes or adds across a vector
//   tile           [token][kTileStride]: dequantised keys, whose first kValueDim numbers are the values
//   scores         [token][kScoreStride], one column a head
//   probabilities  [up to 6 heads][token][head of those]
//   Partial::out   [panel of 2 * LANES values][head][2 * LANES]
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/problem.h"
#include "cpu/kv_rows.h"

namespace chiasma::cpu {

inline constexpr int kMaxHeads = 128;
inline constexpr int kMaxLanes = 16;
inline constexpr int kHeadGroup = 64;
inline constexpr int kMaxHeadGroups = kMaxHeads / kHeadGroup;
// Tokens that are dequantised, scored and accumulated at a time. PERF: 64, 96 and 128 ran alike on a Zen 3 core with
// 512 KB of L2 cache (docs/decisions/0001).
inline constexpr int kBlockTokens = 96;
// Odd multiples of a cache line: a column of a tile then spreads over every set of the L1 cache.
inline constexpr int kTileStride = kMaxKeyDim + kMaxLanes;
inline constexpr int kScoreStride = kHeadGroup + kMaxLanes;
// accumulate_pv's ranges begin and end at multiples of this.
inline constexpr int kValueChunk = 64;

constexpr int num_head_groups(int heads) {
  return (heads + kHeadGroup - 1) / kHeadGroup;
}
constexpr int heads_of_group(int heads, int group) {
  return heads - group * kHeadGroup < kHeadGroup ? heads - group * kHeadGroup : kHeadGroup;
}

// Attention of one group of heads over some of a row's tokens: out is relative to exp(max) and not yet divided by sum.
struct Partial {
  float* out;            // [kValueDim, heads], layout above
  float* max;            // [kHeadGroup]
  float* sum;            // [kHeadGroup]
  std::int64_t* tokens;  // [1] number of tokens attended to; 0: empty
};

// The queries of some heads, each in two parts.
struct QueryRows {
  const bf16_t* q;  // [heads, dim - kRopeDim]
  std::int64_t q_stride;
  const bf16_t* rope;  // [heads, kRopeDim]
  std::int64_t rope_stride;
};
void pack_queries(const QueryRows& rows, int heads, int dim, float* queries);

// rows [tokens] -> tile. A value is code * scale, rounded once; NaN codes give NaN.
void dequantize_kv(KvFormat format, const RowBytes* rows, int tokens, float* tile);

// scores = sm_scale * queries . keys
void score_qk(const float* queries, const float* tile, int tokens, int heads, int dim, float sm_scale, float* scores);

// One step of the online softmax: scores -> probabilities relative to the new max; updates max and sum and gives the
// factor [kHeadGroup] that brings earlier results to the new max. Overwrites scores.
void softmax_step(float* scores, int tokens, int heads, const Partial& state, float* rescale, float* probabilities);

// Values [value_begin, value_end): out = out * rescale + probabilities . values; rescale null: out is overwritten.
void accumulate_pv(const float* probabilities, const float* tile, int tokens, int heads, const float* rescale,
                   int value_begin, int value_end, float* out);

// into = into merged with from. An empty part is an exact identity.
void merge_partials(const Partial& from, const Partial& into, int heads);

// Where a group's results go, one entry a head.
struct HeadOutputs {
  bf16_t* out;  // [heads, kValueDim]
  std::int64_t out_stride;
  float* lse;  // [heads]
  std::int64_t lse_stride;
  const float* sink;  // [heads], or null
  std::int64_t sink_stride;
};
void store_out(const Partial& partial, int heads, const HeadOutputs& outputs);

// Instruction set in use, such as "AVX2".
const char* kernel_target();

}  // namespace chiasma::cpu
