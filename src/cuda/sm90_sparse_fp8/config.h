// What distinguishes the variants of this kernel, and the sizes they share.
#pragma once

#include "cuda/tile/swizzle.h"
#include "format/kv_format.h"

namespace chiasma::sm90_sparse_fp8 {

// Crossover: the two blocks of a cluster share one query token, 64 heads each; each dequantises half of the rows and
// hands them to the other. Without it every block dequantises all rows itself, and there is no cluster.
struct Crossover {
  static constexpr int kClusterSize = 2;
};
struct Baseline {
  static constexpr int kClusterSize = 1;
};

inline constexpr int kHeadsPerCta = 64;                                 // M of the matrix products
inline constexpr int kBlockTokens = 64;                                 // N of QK, contraction of PV
inline constexpr int kKeyPanels = v32::kKeyDim / tile::kPanelColumns;   // 9: eight of codes, one of RoPE
inline constexpr int kRopePanel = v32::kNopeDim / tile::kPanelColumns;  // 8
inline constexpr int kScaleTiles = v32::kNumTiles;                      // 4, of 128 columns
inline constexpr int kPanelsPerScale = kRopePanel / kScaleTiles;        // 2
inline constexpr int kStages = 2;                                       // key tiles in shared memory
// A tile is filled and waited for in halves: panels 0 to 3 with the scales, then 4 to 7 with RoPE.
inline constexpr int kHalves = 2;
inline constexpr int kHalfPanels = kRopePanel / kHalves;

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpsPerWarpgroup = 4;
inline constexpr int kMathWarpgroups = 2;  // each accumulates half of the output columns
inline constexpr int kMathThreads = kMathWarpgroups * kWarpgroupThreads;
inline constexpr int kProducerWarps = 2 * kWarpsPerWarpgroup;  // two a scheduler, to hide each other's latencies
inline constexpr int kThreads = kMathThreads + kProducerWarps * kWarpThreads;
inline constexpr int kColumnsPerWarpgroup = kValueDim / kMathWarpgroups;

// Named barriers: of all math threads, and of each math warpgroup.
inline constexpr int kMathBarrier = 1;
inline constexpr int kOwnerBarrier = 2;

// The producers work in steps of 32 rows, four a warp.
inline constexpr int kStepRows = 32;
inline constexpr int kRowsPerWarp = kStepRows / kProducerWarps;
static_assert(2 * kRowsPerWarp == tile::kAtomRows, "a warp's rows are half of a swizzle atom");

// Registers: what a block gets at launch is shared out anew between the roles.
inline constexpr int kLaunchRegisters = 128;
inline constexpr int kMathRegisters = 200;
inline constexpr int kProducerRegisters = 56;
static_assert(kMathRegisters * kMathThreads + kProducerRegisters * kProducerWarps * kWarpThreads <=
              kLaunchRegisters * kThreads);

// Exponents. f16 operands have 5 exponent bits, the cache's numbers have 8, so that powers of two are taken out and
// come back in float32: of a token's scales so that the largest lies in [1, 2); of its RoPE values so that they stay
// below 2^kRopeTargetExponent+1, by at least 2^-kRopeUnitExponent of what was taken out of the scales; of a head's
// query so that its largest value lies in [2^7, 2^8).
inline constexpr int kRopeTargetExponent = 14;
inline constexpr int kRopeUnitExponent = 5;
inline constexpr int kQueryTargetExponent = 7;

// A head's reference is raised only when a weight exceeds it by 2^(kWeightTargetLog2 + kLazyRaiseLog2), and then so far
// that the largest weight becomes 2^kWeightTargetLog2: accumulators are seldom rescaled, and small weights keep clear
// of f16's denormals. The largest f16 weight is 2^14.
inline constexpr float kWeightTargetLog2 = 5.0f;
inline constexpr float kLazyRaiseLog2 = 8.0f;

}  // namespace chiasma::sm90_sparse_fp8
