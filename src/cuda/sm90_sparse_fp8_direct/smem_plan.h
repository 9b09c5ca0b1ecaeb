// All shared memory of a thread block, and who waits for whom.
//
// clang-format off
// Barrier        count                bytes                 waits         releases                                  first parity
// kv_full[s]     64 gatherer lanes    64 rows of kCopyBytes block's owner gatherer, its copies and its scales       0
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

// Rows of a block as they lie in the cache, with their scales from a scale plane behind them.
template <typename Config>
struct RowBlock {
  alignas(16) std::uint8_t row[kBlockTokens][Config::kPitch];

  // Of formats with four float32 scales.
  __device__ const float4& scales(int index) const {
    return *reinterpret_cast<const float4*>(row[index] + Config::kScalesOffset);
  }
  // Of formats with exponents: four of them from tile `tile` on, the first in the lowest byte.
  __device__ std::uint32_t exponents(int index, int tile) const {
    return *reinterpret_cast<const std::uint32_t*>(row[index] + Config::kScalesOffset + tile);
  }
  __device__ float scale(int index, int tile) const {
    if constexpr (Config::kScaling == Scaling::ratios) {
      return (&scales(index).x)[tile];
    } else {
      return ue8m0_to_float(row[index][Config::kScalesOffset + tile]);
    }
  }
};

// What turns a raw sum of a head into a log2 score, and its softmax reference.
struct HeadState {
  float factor;
  float reference;
};

// What the scales of a block become before anybody multiplies with them. By its owner, warp by warp.
template <typename Config>
struct ValueScales {
  static constexpr int kTiles = Config::kValueTilesScaled;
  // Divided by the token's unit, f16, for PV.
  std::uint16_t code[kTiles == 0 ? 1 : kTiles][kTiles == 0 ? 1 : kBlockTokens];
  // 1 / unit, for values that are no codes.
  float bf16[Config::kHasBf16Values ? kBlockTokens : 1];
};
template <typename Config>
struct ScoreFactors {
  static constexpr bool kHasRatios = Config::kScaling == Scaling::ratios;
  // Of the scales of a tile and the next.
  float ratio[kHasRatios ? Config::kTraits.num_scales() - 1 : 1][kHasRatios ? kBlockTokens : 1];
  float unit[kBlockTokens];  // exponent of two; -infinity: masked; NaN: the token needs care
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

  // [heads, d_qk]: panels of f16, then of bf16, K-major, columns in the order that load_q.cuh explains.
  alignas(tile::kAtomBytes) std::uint8_t q[Config::kKeyPanels][kQueryPanelBytes];
  Probabilities p[kMathGroups];
  RowBlock<Config> rows[Config::kStages];
  ValueScales<Config> value_scales[Config::kStages];
  ScoreFactors<Config> factors[kMathGroups];
  Rescale<Config> rescale[kMathGroups];
  alignas(8) float totals[Config::kHeads];  // multipliers that turn accumulators into results
  std::int32_t nothing_valid;  // published with them: no token counts, and accumulators, be they NaN, neither
  bool valid[Config::kStages][kBlockTokens];
  float2 sums[Config::kSums][Config::kHeads / 8][kWarpgroupThreads];  // of thread t of either math warpgroup
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
template <KvFormat kFormat>
inline constexpr bool kFits = sizeof(SmemPlan<Config<kFormat, Rows<kFormat>::kMostHeadsPerCta>>) <= kMaxSharedBytes &&
                              sizeof(SmemPlan<Config<kFormat, 32>>) <= kMaxSharedBytes;

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
