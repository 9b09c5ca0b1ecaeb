// All shared memory of a block, and who waits for whom.
//
// clang-format off
// Barrier         count                       bytes                        waits             releases             first parity
// kv_full[s][h]   8 producer warps            crossover: the peer's rows,  the tile's owner  producers, arriving  0
//                                             8 warps of kPeerBytes<h>                       copies of the peer
// kv_empty[s]     8 math warps of every       -                            producers         math warps of all    1 (free at
//                 block of the cluster                                                       blocks               the start)
// p_full[s]       128 threads of the tile's   -                            the other math    the owner            0
//                 owner                                                    warpgroup
// clang-format on
//
// Stage s of the n-th block of a CTA is n % 2; so is its owner, the math warpgroup that scores it. Parities follow
// n / 2. Half h of a tile is panels 4 h to 4 h + 3, with the scales in the first half and RoPE in the second; the other
// math warpgroup learns from p_full that both are there. Who fills a tile also fences it for the tensor cores. Named
// barriers: kMathBarrier of all math threads orders the loads of Q and the exchange at the end of a piece.
// kOwnerBarrier plus w of math warpgroup w orders its in-place work on the scales. far_units is written before
// kOwnerBarrier and p_full of its block and read behind them, any_valid behind the exchange at the end of the piece.
#pragma once

#include <cstdint>

#include "cuda/sm90_sparse_fp8/token_scales.cuh"
#include "cuda/sm90_sparse_fp8/work_list.cuh"

namespace chiasma::sm90_sparse_fp8 {

inline constexpr int kPanelBytes = kBlockTokens * tile::kPanelRowBytes;

// What a math warpgroup must remember of its piece while no register is free.
struct PieceProgress {
  std::uint32_t end_block;  // counted like Consumer::block_
  std::uint32_t slot;       // of its Work
};

struct SmemPlan {
  alignas(tile::kAtomBytes) std::uint8_t q[kKeyPanels][kPanelBytes];  // [64 heads, 576] f16, K-major panels
  // [64 tokens, 576] f16, bare codes and RoPE; the same bytes serve as V, and once a block is scored, its RoPE panel as
  // the second panel of P.
  std::uint8_t kv[kStages][kKeyPanels][kPanelBytes];
  // [64 heads, 64 tokens] f16, weights for the first scale tile of the warpgroup that does not own the block. At the
  // end of a piece: sums of weights, [warpgroup][head] float.
  std::uint8_t p[kPanelBytes];
  TokenGroup tokens[kStages][kTokenGroups];
  float reference[kHeadsPerCta];              // log2 softmax reference of each head after the latest block
  std::uint8_t query_exponent[kHeadsPerCta];  // biased, of the power of two that each head's query was divided by
  // What is needed once a piece, since registers are short in every role.
  std::int32_t group;
  std::int32_t first_head;
  std::int32_t first_row;  // of every block, that this thread block gathers
  WorkCursor work_cursor;
  Work work[2];  // of even and odd pieces
  bool has_work[2];
  std::uint32_t any_valid;  // whether the piece has had a valid token
  std::uint32_t far_units;  // whether the piece has had a token whose unit is a far one (wide_sum.h)
  PieceProgress progress[kMathWarpgroups];
  std::uint64_t kv_full[kStages][kHalves];
  std::uint64_t kv_empty[kStages];
  std::uint64_t p_full[kStages];
};

inline constexpr int kMaxSharedBytes = 227 * 1024;
static_assert(sizeof(SmemPlan) <= kMaxSharedBytes);

// What one warp of the peer completes on kv_full: the values of its rows, and their scales.
template <int kHalf>
inline constexpr std::uint32_t kPeerBytes = kHalf == 0
                                                ? kRowsPerWarp* kHalfPanels* tile::kPanelRowBytes + sizeof(TokenGroup)
                                                : kRowsPerWarp*(kHalfPanels + 1) * tile::kPanelRowBytes;
static_assert(kRowsPerWarp == kGroupTokens);

}  // namespace chiasma::sm90_sparse_fp8
