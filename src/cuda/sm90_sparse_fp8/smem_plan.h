// All shared memory of a block, and who waits for whom.
//
// clang-format off
// Barrier      count                          bytes                        waits             releases             first parity
// kv_full[s]   8 producer warps               crossover: the peer's half,  both math         producers, arriving  0
//                                             32 rows of 1160              warpgroups        copies of the peer
// kv_empty[s]  8 math warps of every block    -                            producers         math warps of all    1 (free at
//              of the cluster                                                                blocks               the start)
// p_full[s]    4 warps of the tile's owner    -                            the other math    the owner            0
//                                                                          warpgroup
// clang-format on
//
// Stage s of the n-th block of a CTA is n % 2; so is its owner, the math warpgroup that scores it. Parities follow
// n / 2. Among the math threads named barrier kMathBarrier orders the loads of Q and the exchange at the end of a
// piece.
#pragma once

#include <cstdint>

#include "cuda/sm90_sparse_fp8/work_list.cuh"

namespace chiasma::sm90_sparse_fp8 {

inline constexpr int kPanelBytes = kBlockTokens * tile::kPanelRowBytes;
inline constexpr int kMathBarrier = 1;

// What a token's scores need: the power of two that its values were divided by, and 0, or for a masked token 0 and
// -infinity.
struct alignas(8) TokenWeight {
  float factor;
  float bias;
};

struct SmemPlan {
  alignas(tile::kAtomBytes) std::uint8_t q[kKeyPanels][kPanelBytes];  // [64 heads, 576] f16, K-major panels
  std::uint8_t kv[kStages][kKeyPanels][kPanelBytes];                  // [64 tokens, 576] f16, the same bytes serve as V
  std::uint8_t p[kPanelBytes];                                        // [64 heads, 64 tokens] f16
  TokenWeight token[kStages][kBlockTokens];
  float reference[kStages][kHeadsPerCta];  // log2 softmax reference of each head after the block
  float factor_reference[kStages];         // largest token factor so far, the unit of the accumulators
  float row_sum[kMathWarpgroups][kHeadsPerCta];
  float head_scale[kHeadsPerCta];  // turns a raw dot product times the token factor into a log2 score
  // What is needed once a piece, since registers are short in every role.
  std::int32_t group;
  std::int32_t first_head;
  std::int32_t first_row;  // of every block, that this thread block gathers
  WorkCursor work_cursor;
  Work work[2];  // of even and odd pieces
  bool has_work[2];
  std::uint64_t kv_full[kStages];
  std::uint64_t kv_empty[kStages];
  std::uint64_t p_full[kStages];
};

inline constexpr int kMaxSharedBytes = 227 * 1024;
static_assert(sizeof(SmemPlan) <= kMaxSharedBytes);

// What one row of the peer completes on kv_full: its values and its weight.
inline constexpr std::uint32_t kPeerRowBytes = v32::kKeyDim * 2 + sizeof(TokenWeight);

}  // namespace chiasma::sm90_sparse_fp8
