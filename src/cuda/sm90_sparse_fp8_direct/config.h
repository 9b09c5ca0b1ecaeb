// Sizes and roles of this kernel. What depends on the number of heads is in Config.
#pragma once

#include "cuda/tile/swizzle.h"
#include "format/kv_format.h"

namespace chiasma::sm90_sparse_fp8_direct {

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpsPerWarpgroup = 4;

// Roles, one warpgroup each. The two math warpgroups take turns in scoring blocks, and each sums its half of the output
// columns over all blocks; the gatherer keeps rows coming.
enum class Role { math_left, math_right, gather };
inline constexpr int kRoles = 3;
inline constexpr int kThreads = kRoles * kWarpgroupThreads;
inline constexpr int kMathGroups = 2;
inline constexpr int kMathThreads = kMathGroups * kWarpgroupThreads;
inline constexpr int kMathWarps = kMathGroups * kWarpsPerWarpgroup;

// Registers: what a thread block gets at launch is shared out anew between the roles.
inline constexpr int kLaunchRegisters = 168;

inline constexpr int kBlockTokens = 64;  // M of QK, contraction of PV
inline constexpr int kTokensPerWarp = kBlockTokens / kWarpsPerWarpgroup;
inline constexpr int kCodePanels = v32::kNopeDim / tile::kPanelColumns;  // 8, two a scale tile
inline constexpr int kKeyPanels = kCodePanels + 1;                       // the last one is RoPE
inline constexpr int kRopePanel = kCodePanels;
inline constexpr int kPanelsPerScaleTile = v32::kTileDim / tile::kPanelColumns;
inline constexpr int kStepsPerPanel = tile::kPanelColumns / 16;
inline constexpr int kColumnsPerGroup = kValueDim / kMathGroups;  // of the output
inline constexpr int kColumnsPerThread = 8;                       // consecutive
inline constexpr int kValueTiles = kColumnsPerGroup / 64;         // 64 x heads accumulator tiles
inline constexpr int kColumnsPerWarp = kColumnsPerGroup / kWarpsPerWarpgroup;
static_assert(kColumnsPerThread == 2 * kValueTiles);

// kHeads: columns of both products, 8, 16, 32 or 64. More heads are several thread blocks.
template <int kHeadsPerCta>
struct Config {
  static constexpr int kHeads = kHeadsPerCta;
  // Blocks of rows in shared memory: as many as fit beside the query.
  static constexpr int kStages = kHeadsPerCta == 64 ? 3 : 4;
  static constexpr int kMathRegisters = kHeadsPerCta == 64 ? 232 : 216;
  static constexpr int kGatherRegisters = kHeadsPerCta == 64 ? 40 : 72;
  static_assert(kMathGroups * kMathRegisters + kGatherRegisters <= kRoles * kLaunchRegisters);
};
inline constexpr int kMinHeadsPerCta = 8;
inline constexpr int kMaxHeadsPerCta = 64;

// Pieces of work whose descriptions may be in use or ahead of use at a time.
inline constexpr int kPieceSlots = 4;
static_assert(kPieceSlots % 2 == 0, "a slot's parity is its piece's");

// f16 operands have 5 exponent bits, the cache's scales have 8. A token's scales are divided by its unit, which brings
// the largest to 2^5 (codes reach 448, so values stay below 14,337, and those of smaller scales keep their bits); a
// head's query is brought to [2^4, 2^5), so that even a score of scales around 2^100 stays below float32's limit. Both
// come back in float32.
inline constexpr float kScaleTarget = 0x1p5f;
inline constexpr int kQueryTargetExponent = 4;
// Units outside of this range would let P or the final multipliers leave float32.
inline constexpr float kLeastUnit = 0x1p-100f;
inline constexpr float kMostUnit = 0x1p115f;
// Tokens of other units need care: see FarSums.
inline constexpr float kNearUnitExponent = 45.0f;

// Scales of neighbouring tiles that are further apart than this could let the sums of QK leave float32: ratios are
// multiplied up to three times.
inline constexpr float kMostScaleRatio = 0x1p26f;

// A head's softmax reference is raised only when a score exceeds it by 2^kLazyRaiseLog2, so that accumulators are
// seldom rescaled. P then reaches 2^kLazyRaiseLog2, far inside f16.
inline constexpr float kLazyRaiseLog2 = 8.0f;

}  // namespace chiasma::sm90_sparse_fp8_direct
