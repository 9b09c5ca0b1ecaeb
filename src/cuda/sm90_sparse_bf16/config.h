// Sizes and roles of this kernel. Roles, threads and the number of tokens of a block are those of
// ../sm90_sparse_fp8_direct, whose walk over pieces and rows it shares.
#pragma once

#include "cuda/sm90_sparse_fp8_direct/config.h"

namespace chiasma::sm90_sparse_bf16 {

namespace direct = sm90_sparse_fp8_direct;

using direct::kBlockTokens, direct::kColumnsPerGroup, direct::kLaunchRegisters, direct::kMathGroups,
    direct::kMathThreads, direct::kMathWarps, direct::kPieceSlots, direct::kRoles, direct::kThreads,
    direct::kWarpgroupThreads, direct::kWarpsPerWarpgroup, direct::kWarpThreads, direct::Role;

inline constexpr int kHeadsPerCta = 64;  // M of both products
inline constexpr int kStages = 2;        // blocks of rows in shared memory
inline constexpr int kRowsPerWarp = kHeadsPerCta / kWarpsPerWarpgroup;
inline constexpr int kPanelBytes = kBlockTokens * tile::kPanelRowBytes;
static_assert(kHeadsPerCta == kBlockTokens, "panels of the query, of keys and of P are alike");

// A panel of 64 columns behind the values: rotary keys, and once they are scored, P of the block.
inline constexpr int kValuePanels = kValueDim / tile::kPanelColumns;
inline constexpr int kProbabilityPanel = kValuePanels;
inline constexpr int kBlockPanels = kValuePanels + 1;
inline constexpr int kPanelsPerGroup = kValuePanels / kMathGroups;

// kWithVectors: queries and outputs lie in multiples of 16 bytes.
template <KvFormat kKvFormat, bool kWithVectors>
struct Config : direct::Rows<kKvFormat> {
  static_assert(direct::Rows<kKvFormat>::kIsBf16);
  static constexpr bool kVectors = kWithVectors;
  static constexpr int kHeads = kHeadsPerCta;
  static constexpr int kStages = sm90_sparse_bf16::kStages;
  static constexpr bool kHasRotaryPanel = direct::Rows<kKvFormat>::kKeyPanels > kValuePanels;
};

inline constexpr int kMathRegisters = 216;
inline constexpr int kGatherRegisters = 72;
static_assert(kMathGroups * kMathRegisters + kGatherRegisters <= kRoles * kLaunchRegisters);

// A head's reference is raised only when a score exceeds it by this much, so that accumulators are seldom rescaled.
inline constexpr float kLazyRaiseLog2 = 8.0f;

}  // namespace chiasma::sm90_sparse_bf16
