// All shared memory of a thread block, and who waits for whom.
//
// clang-format off
// Barrier         count                     waits               releases                                 first parity
// kv_full[s]      128 gatherer threads and  owner, the other    gatherer: its copies, and the validity   0
//                 64 of their lanes         group through it    of tokens
// kv_empty[s]     8 math warps              gatherer            math, once PV of the block is done       1 (free at the start)
// p_full[s]       128 threads of the owner  the other group     owner: P, references of a block          0
// piece_full[i]   1                         math                gatherer: the piece's description        0
// piece_empty[i]  8 math warps              gatherer            math, when they are done with the piece  1
// clang-format on
//
// s = block % kStages over all pieces, i = piece % kPieceSlots. The owner of a block is math warpgroup block % 2,
// counted within its piece: it scores it. P lies in a panel of its block's stage, so that kv_empty frees that, too.
// Math warpgroups meet at kMathBarrier, each by itself at kGroupBarrier + its number.
#pragma once

#include <cstdint>

#include "cuda/sm90_sparse_bf16/config.h"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"

namespace chiasma::sm90_sparse_bf16 {

using direct::kGroupBarrier, direct::kMathBarrier, direct::Ring;

template <typename Config>
struct SmemPlan {
  // [64 heads, d_qk] and [64 tokens, d_qk], bf16, panels of 64 columns with the swizzle of the tensor cores.
  alignas(tile::kAtomBytes) std::uint8_t q[Config::kKeyPanels][kPanelBytes];
  std::uint8_t kv[kStages][kBlockPanels][kPanelBytes];
  direct::HeadState head[kHeadsPerCta];    // the factor alone
  float reference[kStages][kHeadsPerCta];  // log2; -infinity: no valid token so far
  // Of probabilities, and of those as they are rounded, at the end of a piece and relative to the last references.
  float2 sums[kMathGroups][kHeadsPerCta];
  alignas(4) bool valid[kStages][kBlockTokens];
  direct::Work work[kPieceSlots];
  std::int32_t first_head;  // of this thread block
  std::uint64_t kv_full[kStages];
  std::uint64_t kv_empty[kStages];
  std::uint64_t p_full[kStages];
  std::uint64_t piece_full[kPieceSlots];
  std::uint64_t piece_empty[kPieceSlots];
};

static_assert(sizeof(SmemPlan<Config<KvFormat::bf16, true>>) <= direct::kMaxSharedBytes);

}  // namespace chiasma::sm90_sparse_bf16
