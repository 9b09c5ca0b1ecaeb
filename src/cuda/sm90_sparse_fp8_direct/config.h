// Sizes and roles of this kernel. What depends on the number of heads is in Config.
#pragma once

#include "cuda/tile/swizzle.h"
#include "format/kv_format.h"

namespace chiasma::sm90_sparse_fp8_direct {

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpsPerWarpgroup = 4;

// Roles, one warpgroup each, two for accumulation. The scorer turns rows into probabilities, the accumulators turn
// probabilities into output columns, the gatherer keeps rows coming.
enum class Role { score, accumulate_left, accumulate_right, gather };
inline constexpr int kRoles = 4;
inline constexpr int kThreads = kRoles * kWarpgroupThreads;
inline constexpr int kAccumulators = 2;

// Registers: what a block gets at launch is shared out anew between the roles.
inline constexpr int kLaunchRegisters = 128;

inline constexpr int kBlockTokens = 64;  // M of QK, contraction of PV
inline constexpr int kTokensPerWarp = kBlockTokens / kWarpsPerWarpgroup;
inline constexpr int kNotes = 2;  // from the scorer to the accumulators, under way at a time
inline constexpr int kCodePanels = v32::kNopeDim / tile::kPanelColumns;  // 8, two a scale tile
inline constexpr int kKeyPanels = kCodePanels + 1;                       // the last one is RoPE
inline constexpr int kRopePanel = kCodePanels;
inline constexpr int kPanelsPerScaleTile = v32::kTileDim / tile::kPanelColumns;
inline constexpr int kStepsPerPanel = tile::kPanelColumns / 16;
inline constexpr int kColumnsPerAccumulator = kValueDim / kAccumulators;
inline constexpr int kColumnsPerThread = 8;                      // of the output, consecutive
inline constexpr int kValueTiles = kColumnsPerAccumulator / 64;  // 64 x heads accumulator tiles
inline constexpr int kColumnsPerWarp = kColumnsPerAccumulator / kWarpsPerWarpgroup;
static_assert(kColumnsPerThread == 2 * kValueTiles);

// kHeads: columns of both products, 8, 16, 32 or 64. More heads are several thread blocks.
template <int kHeadsPerCta>
struct Config {
  static constexpr int kHeads = kHeadsPerCta;
  // Blocks of rows in shared memory: as many as fit beside the query.
  static constexpr int kStages = kHeadsPerCta == 64 ? 3 : 4;
  static constexpr int kScoreRegisters = kHeads == 64 ? 128 : 152;
  static constexpr int kAccumulateRegisters = kHeads == 64 ? 176 : 144;
  static constexpr int kGatherRegisters = kHeads == 64 ? 32 : 72;
  static_assert(kScoreRegisters + kAccumulators * kAccumulateRegisters + kGatherRegisters <= kRoles * kLaunchRegisters);
};
// Step of QK behind which the last block's probabilities are handed to the accumulators (see Scorer::score_block), and
// the one behind which the next note is begun.
inline constexpr int kPublishStep = 14;
inline constexpr int kNoteStep = 15;
static_assert(kNoteStep > kPublishStep);
inline constexpr int kMinHeadsPerCta = 8;
inline constexpr int kMaxHeadsPerCta = 64;

// f16 operands have 5 exponent bits, the cache's scales have 8. A token's scales are divided by a power of two, its
// unit, that brings the largest to [2^5, 2^6) (codes reach 448, so values stay below 28,672); a head's query is brought
// to [2^4, 2^5), so that even a score of scales around 2^100 stays below float32's limit. Both come back in float32.
inline constexpr int kScaleTargetExponent = 5;
inline constexpr int kQueryTargetExponent = 4;
// Units outside of this range would let the sum of probabilities, which is taken free of units, leave float32.
inline constexpr int kLeastUnitExponent = -100;
inline constexpr int kMostUnitExponent = 115;

// Scales of a token that are further apart than this would let the chains of QK leave float32.
inline constexpr float kMostScaleRatio = 0x1p80f;

// A head's softmax reference is raised only when a score exceeds it by 2^kLazyRaiseLog2, so that accumulators are
// seldom rescaled. P then reaches 2^kLazyRaiseLog2, far inside f16.
inline constexpr float kLazyRaiseLog2 = 8.0f;

}  // namespace chiasma::sm90_sparse_fp8_direct
