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
inline constexpr int kStages = 2;                                       // key tiles in shared memory

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpsPerWarpgroup = 4;
inline constexpr int kMathWarpgroups = 2;  // each accumulates half of the output columns
inline constexpr int kMathThreads = kMathWarpgroups * kWarpgroupThreads;
inline constexpr int kProducerWarps = 2 * kWarpsPerWarpgroup;  // two a scheduler, to hide each other's latencies
inline constexpr int kThreads = kMathThreads + kProducerWarps * kWarpThreads;
inline constexpr int kColumnsPerWarpgroup = kValueDim / kMathWarpgroups;

// The producers work in steps of 32 rows, four a warp.
inline constexpr int kStepRows = 32;
inline constexpr int kRowsPerWarp = kStepRows / kProducerWarps;
static_assert(2 * kRowsPerWarp == tile::kAtomRows, "a warp's rows are half of a swizzle atom");
// With crossover a warp's rows leave for the peer two at a time, so that the copy of the first overlaps the conversion
// of the others.
inline constexpr int kRowsPerSend = 2;

// Registers: what a block gets at launch is shared out anew between the roles.
inline constexpr int kLaunchRegisters = 128;
inline constexpr int kMathRegisters = 200;
inline constexpr int kProducerRegisters = 56;
static_assert(kMathRegisters * kMathThreads + kProducerRegisters * kProducerWarps * kWarpThreads <=
              kLaunchRegisters * kThreads);

// f16 operands have 5 exponent bits, the cache's numbers have 8. A token's values are divided by a power of two, its
// factor, that brings its largest scale to [2^5, 2^6) (codes reach 448, so values stay below 28,672) and its RoPE
// values below 2^15; a head's query likewise to [2^14, 2^15). Factors come back in float32: into the score, and into P.
inline constexpr int kScaleTargetExponent = 5;
inline constexpr int kRopeTargetExponent = 14;
inline constexpr int kQueryTargetExponent = 14;

// The softmax reference of a head is raised only when a score exceeds it by 2^kLazyRaiseLog2, so that accumulators are
// seldom rescaled. P then reaches 2^kLazyRaiseLog2, far inside f16.
inline constexpr float kLazyRaiseLog2 = 8.0f;

}  // namespace chiasma::sm90_sparse_fp8
