// Sizes and roles of this kernel. What depends on the cache's format and the number of heads is in Config.
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
inline constexpr int kStepsPerPanel = tile::kPanelColumns / 16;
inline constexpr int kColumnsPerGroup = kValueDim / kMathGroups;  // of the output
inline constexpr int kColumnsPerThread = 8;                       // consecutive
inline constexpr int kValueTiles = kColumnsPerGroup / 64;         // 64 x heads accumulator tiles
inline constexpr int kColumnsPerWarp = kColumnsPerGroup / kWarpsPerWarpgroup;
static_assert(kColumnsPerThread == 2 * kValueTiles);

// How scales enter the products.
enum class Scaling {
  ratios,    // any float32: sums of QK are multiplied where a tile of columns ends, V's codes as operands
  operands,  // powers of two: codes are multiplied as they become operands, which is exact
  none,      // one for the whole cache, which is in sm_scale and in the results' multipliers
};

// A format's rows as they lie in shared memory.
template <KvFormat kKvFormat>
struct Rows {
  static constexpr KvFormat kFormat = kKvFormat;
  static constexpr RowTraits kTraits = traits_of(kKvFormat);
  static constexpr Scaling kScaling = kTraits.scale_type == ScaleType::float32 ? Scaling::ratios
                                      : kTraits.scale_type == ScaleType::ue8m0 ? Scaling::operands
                                                                               : Scaling::none;
  static constexpr bool kHasSecondCache = kTraits.has_second_cache;

  static constexpr int kScaleBytes = kScaling == Scaling::ratios ? 4 : 1;
  static constexpr int kBf16End = kTraits.bf16_columns == 0 ? 0 : kTraits.bf16_offset + 2 * kTraits.bf16_columns;
  static constexpr int kScalesEnd = kTraits.has_scale_plane() || kScaling == Scaling::none
                                        ? 0
                                        : kTraits.scales_offset + kTraits.num_scales() * kScaleBytes;
  static constexpr int largest(int a, int b) { return a > b ? a : b; }
  // What one bulk copy brings: the row as far as anything is read of it.
  static constexpr int kCopyBytes = largest(kTraits.code_columns, largest(kBf16End, kScalesEnd));
  // Scales of a page's scale plane are put behind that.
  static constexpr int kPlaneBytes = kTraits.plane_group_bytes;
  static constexpr int kScalesOffset = kTraits.has_scale_plane() ? kCopyBytes : kTraits.scales_offset;
  // LAYOUT: an odd number of chunks of 16 bytes, so that rows shift by one bank group of eight: QK reads the same chunk
  // of eight rows at a time, PV two chunks of rows 2 i, 2 i + 2, 2 i + 4 and 2 i + 6, and both meet all banks once.
  static constexpr int kPitch = ((kCopyBytes + kPlaneBytes + 15) / 16 | 1) * 16;
  static_assert(kCopyBytes % 16 == 0 && kTraits.row_bytes % 16 == 0);

  static constexpr int kCodePanels = kTraits.code_columns / tile::kPanelColumns;
  static constexpr int kBf16Panels = kTraits.bf16_columns / tile::kPanelColumns;  // behind those of codes
  static constexpr int kKeyPanels = kCodePanels + kBf16Panels;
  static_assert(kCodePanels * tile::kPanelColumns == kTraits.code_columns);
  // No codes at all: rows are operands as they are, and so P is bf16, too.
  static constexpr bool kIsBf16 = kTraits.code_columns == 0;
  // Of probabilities; with bf16 another, of those as they are rounded, divides the results, so that a row that few
  // tokens make up does not carry their rounding errors.
  static constexpr int kSums = kIsBf16 ? 2 : 1;
  // Columns of V that are codes; the others are the bf16 columns of the row, and belong to one warp.
  static constexpr int kValueCodes = kTraits.code_columns < kValueDim ? kTraits.code_columns : kValueDim;
  static constexpr bool kHasBf16Values = !kIsBf16 && kValueCodes < kValueDim;
  static_assert(!kHasBf16Values || kValueDim - kValueCodes == kColumnsPerWarp);
  // PERF: with two kinds of values in a row ptxas finds no registers for 64 heads and serialises the products
  // (docs/decisions/0006); two blocks of bf16 rows leave no room for a query of 64 heads.
  static constexpr int kMostHeadsPerCta = kHasBf16Values || kIsBf16 ? 32 : 64;
  // Tiles of columns of V with a scale each.
  static constexpr int kValueTilesScaled = kScaling == Scaling::none ? 0 : kValueCodes / kTraits.scale_columns;
};

// kHeads: columns of both products, 8, 16, 32 or 64. More heads are several thread blocks.
// kWithVectors: queries and outputs lie in multiples of 16 bytes. PERF: what reads and writes them number by number is
// a kernel of its own, since as a branch it made the others 2 to 3 % slower (H200, 2026-12-01).
template <KvFormat kKvFormat, int kHeadsPerCta, bool kWithVectors = true>
struct Config : Rows<kKvFormat> {
  static constexpr bool kVectors = kWithVectors;
  static constexpr int kHeads = kHeadsPerCta;
  // Blocks of rows in shared memory: as many as fit beside the query.
  static constexpr int kStages = Rows<kKvFormat>::kIsBf16 ? 2 : kHeadsPerCta == 64 ? 3 : 4;
  // A gatherer of two caches keeps more in mind.
  static constexpr int kMathRegisters = kHeadsPerCta != 64 ? 216 : Rows<kKvFormat>::kHasSecondCache ? 224 : 232;
  static constexpr int kGatherRegisters = kHeadsPerCta != 64 ? 72 : Rows<kKvFormat>::kHasSecondCache ? 56 : 40;
  static_assert(kMathGroups * kMathRegisters + kGatherRegisters <= kRoles * kLaunchRegisters);
};
// Of that kernel, whatever the plan says.
inline constexpr int kHeadsPerCtaByNumbers = 16;
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

// Scales that are powers of two need no unit while all of a token's are within these bounds: then they are normal f16
// numbers, and codes times them are f16 numbers too. Biased exponents.
inline constexpr std::uint32_t kLeastPlainExponent = 127 - 14;
inline constexpr std::uint32_t kMostPlainExponent = 127 + 7;
// The same for the largest of the values that are no codes, as bf16 bits without sign: f16 then rounds them no worse
// than bf16 does, relative to that largest.
inline constexpr std::uint32_t kLeastPlainBf16 = (127 - 10) << 7;
inline constexpr std::uint32_t kMostPlainBf16 = (127 + 15) << 7;

// Scales of neighbouring tiles that are further apart than this could let the sums of QK leave float32: ratios are
// multiplied up to three times.
inline constexpr float kMostScaleRatio = 0x1p26f;

// A head's softmax reference is raised only when a score exceeds it by 2^kLazyRaiseLog2, so that accumulators are
// seldom rescaled. P then reaches 2^kLazyRaiseLog2, far inside f16.
inline constexpr float kLazyRaiseLog2 = 8.0f;

}  // namespace chiasma::sm90_sparse_fp8_direct
