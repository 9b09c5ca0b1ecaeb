// All shared memory of a thread block, and who waits for whom.
//
// clang-format off
// Barrier        count                bytes                 waits         releases                                  first parity
// kv_full[s]     4 gatherer warps     64 rows of 656        scorer        gatherer, its copies                      0
// kv_empty[s][w] 8 accumulator warps  -                     gatherer      accumulators, once tokens 16 w to 16 w +  1 (free at
//                                                           warp w        15 are operands in their registers; the   the start)
//                                                                         scorer is done with the stage before
// q_full         128 gatherer lanes   -                     scorer        their copies                              0
// q_empty        4 scorer warps       -                     gatherer      scorer, after the last QK of a piece      1
// note_full[t]   4 scorer warps       -                     accumulators  scorer                                    0
// note_empty[t]  8 accumulator warps  -                     scorer        accumulators                              1
// clang-format on
//
// s = block % kStages, t = note % 2, counted over the life of the thread block. The scorer tells the accumulators what
// to do by notes, one a block and one at the end of each piece. Its own warps meet at named barrier kScoreBarrier.
#pragma once

#include <cstdint>

#include "cuda/sm90_sparse_fp8_direct/config.h"
#include "cuda/sm90_sparse_fp8_direct/work_list.cuh"
#include "format/numbers.h"

namespace chiasma::sm90_sparse_fp8_direct {

inline constexpr int kScoreBarrier = 1;

// Rows of a block as they lie in the cache. LAYOUT: a row is 41 chunks of 16 bytes, so that rows shift by one bank
// group of eight: QK reads the same chunk of eight rows at a time, PV two chunks of rows 2 i, 2 i + 2, 2 i + 4 and 2 i
// + 6, and both meet all banks once.
struct RowBlock {
  alignas(16) std::uint8_t row[kBlockTokens][v32::kRowBytes];

  __device__ const float4& scales(int index) const {
    return *reinterpret_cast<const float4*>(row[index] + v32::kScalesOffset);
  }
  __device__ float scale(int index, int tile) const { return (&scales(index).x)[tile]; }
};

// What turns a raw sum of a head into a log2 score, and its softmax reference.
struct HeadState {
  float factor;
  float reference;
};

using ValueScales = std::uint16_t[v32::kNumTiles][kBlockTokens];

// What the scales of a block become before anybody multiplies with them. By the scorer, warp by warp.
struct BlockFactors {
  ValueScales value_scale;       // divided by the token's unit, f16, for PV
  float ratio[2][kBlockTokens];  // of the scales of tiles 0 and 2, 1 and 3, for QK
  float unit[kBlockTokens];      // exponent of two; -infinity: masked; NaN: the ratios are of no use
};

enum class NoteKind : std::int32_t { block, rescale_and_block, end_of_piece, no_more_work };

// Of the block that a note is about: [64 tokens, heads] f16, rows of 128 bytes.
struct alignas(tile::kAtomBytes) Probabilities {
  std::uint8_t bytes[kBlockTokens * tile::kPanelRowBytes];
};

template <typename Config>
struct Note {
  // Of accumulators: before the block, or at the end of a piece to results.
  float multiplier[Config::kHeads];
  // Where the results of a piece go, for the thread block's first head; the one that is not null.
  bf16_t* out;
  float* part_out;
  NoteKind kind;
  std::uint32_t stage;  // where the block's rows are
};

template <typename Config>
struct SmemPlan {
  static constexpr int kQueryPanelBytes = Config::kHeads * tile::kPanelRowBytes;

  // [heads, 576]: eight panels of f16, one of bf16, K-major, columns in the order of fragment_column().
  alignas(tile::kAtomBytes) std::uint8_t q[kKeyPanels][kQueryPanelBytes];
  Probabilities p[kNotes];
  RowBlock rows[Config::kStages];
  BlockFactors factors[Config::kStages];
  Note<Config> note[kNotes];
  bool valid[Config::kStages][kBlockTokens];
  float2 sums[Config::kHeads / 8][kWarpgroupThreads];  // of the scorer's threads
  alignas(16) HeadState head[Config::kHeads];
  // Among the scorer's warps: maxima or sums of each, and by how much references rise.
  float of_warp[kWarpsPerWarpgroup][Config::kHeads];
  float raise[Config::kHeads];
  // First heads of the queries of even and odd pieces, for each of the gatherer's warps.
  const bf16_t* query[kWarpsPerWarpgroup][2];
  // The scorer's place in the list of pieces, in memory since registers are short.
  std::int32_t group;
  std::int32_t first_head;
  std::int32_t unit;
  Work work;
  bool has_work;
  std::uint32_t query_phase;  // of q_full
  std::uint64_t kv_full[Config::kStages];
  std::uint64_t kv_empty[Config::kStages][kWarpsPerWarpgroup];
  std::uint64_t q_full;
  std::uint64_t q_empty;
  std::uint64_t note_full[kNotes];
  std::uint64_t note_empty[kNotes];
};

inline constexpr int kAccumulatorWarps = kAccumulators * kWarpsPerWarpgroup;
// Every gatherer lane arrives when its copies have landed.
inline constexpr int kQueryFullCount = kWarpgroupThreads;

inline constexpr int kMaxSharedBytes = 227 * 1024;
static_assert(sizeof(SmemPlan<Config<64>>) <= kMaxSharedBytes);
static_assert(sizeof(SmemPlan<Config<32>>) <= kMaxSharedBytes);

// A ring of stages: its current place and the parity that a wait for it uses.
template <int kSize>
struct Ring {
  std::uint32_t index = 0;
  std::uint32_t phase = 0;
  __device__ void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1u;
    }
  }
};

}  // namespace chiasma::sm90_sparse_fp8_direct
