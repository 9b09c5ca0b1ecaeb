// All shared memory of a thread block, and who waits for whom.
//
// clang-format off
// Barrier        count                bytes                 waits         releases                                  first parity
// kv_full[s]     64 gatherer lanes    64 rows of 656        block's owner gatherer, its copies                      0
// kv_empty[s][w] 8 math warps         -                     gatherer      math, once tokens 16 w to 16 w + 15 are   1 (free at
//                                                                         operands in their registers               the start)
// piece_full[i]  1                    -                     math          gatherer: the piece's description          0
// piece_empty[i] 8 math warps         -                     gatherer      math, when they are done with the piece   1
// p_full[o]      128 threads, group o -                     math          owner: P, references, sums of a block     0
// p_empty[o]     8 math warps         -                     group o       math, after PV of the block               1
// totals_full    128 threads          -                     math          owner of a piece's last block             0
// clang-format on
//
// s = block % kStages, i = piece % kPieceSlots and o = block % 2 (within its piece), the math warpgroup that owns the
// block: it scores it. Blocks are scored in order, since p_full of one block comes before the softmax of the next; so
// what softmaxes leave behind (HeadState, sums) is handed from group to group. Math warpgroups meet at kMathBarrier,
// each by itself at kGroupBarrier + its number.
#pragma once

#include <cstdint>

#include "cuda/sm90_sparse_fp8_direct/config.h"
#include "cuda/sm90_sparse_fp8_direct/work_list.cuh"
#include "format/numbers.h"

namespace chiasma::sm90_sparse_fp8_direct {

inline constexpr int kMathBarrier = 1;
inline constexpr int kGroupBarrier = 2;

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

// What the scales of a block become before anybody multiplies with them. By its owner, warp by warp.
using ValueScales = std::uint16_t[v32::kNumTiles][kBlockTokens];  // divided by the token's unit, f16, for PV
struct ScoreFactors {
  float ratio[v32::kNumTiles - 1][kBlockTokens];  // of the scales of a tile and the next
  float unit[kBlockTokens];                       // exponent of two; -infinity: masked; NaN: the token needs care
};

// Of one block: [64 tokens, heads] f16, rows of 128 bytes.
struct alignas(tile::kAtomBytes) Probabilities {
  std::uint8_t bytes[kBlockTokens * tile::kPanelRowBytes];
};

// What accumulators are multiplied by before PV of a block.
template <typename Config>
struct alignas(16) Rescale {
  float by[Config::kHeads];
  std::int32_t needed;
};

// What softmaxes know of a piece so far, beside references and sums.
struct PieceState {
  bool seen_valid;
  bool far_sums;      // see FarSums
  float raise_above;  // exponents beyond this one are looked into
};

template <typename Config>
struct SmemPlan {
  static constexpr int kQueryPanelBytes = Config::kHeads * tile::kPanelRowBytes;

  // [heads, 576]: eight panels of f16, one of bf16, K-major, columns in the order that load_q.cuh explains.
  alignas(tile::kAtomBytes) std::uint8_t q[kKeyPanels][kQueryPanelBytes];
  Probabilities p[kMathGroups];
  RowBlock rows[Config::kStages];
  ValueScales value_scales[Config::kStages];
  ScoreFactors factors[kMathGroups];
  Rescale<Config> rescale[kMathGroups];
  alignas(8) float totals[Config::kHeads];  // multipliers that turn accumulators into results
  bool valid[Config::kStages][kBlockTokens];
  float2 sums[Config::kHeads / 8][kWarpgroupThreads];  // of thread t of either math warpgroup
  alignas(16) HeadState head[Config::kHeads];
  // Among a math warpgroup's warps: maxima or sums of each, by how much references rise, references of far sums.
  float of_warp[kWarpsPerWarpgroup][Config::kHeads];
  float raise[Config::kHeads];
  float far_reference[Config::kHeads];
  PieceState piece;
  Work work[kPieceSlots];
  std::int32_t first_head;  // of this thread block
  std::uint64_t kv_full[Config::kStages];
  std::uint64_t kv_empty[Config::kStages][kWarpsPerWarpgroup];
  std::uint64_t piece_full[kPieceSlots];
  std::uint64_t piece_empty[kPieceSlots];
  std::uint64_t p_full[kMathGroups];
  std::uint64_t p_empty[kMathGroups];
  std::uint64_t totals_full;
};

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
  __device__ Ring next() const {
    Ring ring = *this;
    ring.advance();
    return ring;
  }
};

}  // namespace chiasma::sm90_sparse_fp8_direct
