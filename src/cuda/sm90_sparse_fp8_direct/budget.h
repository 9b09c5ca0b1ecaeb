// What a block costs each resource of a multiprocessor, by stage, with 128 heads (two thread blocks share a query
// token). Not in it: what is needed once a row (load_q, store_out) and waiting.
#pragma once

#include <array>

#include "cuda/sm90_sparse_fp8_direct/config.h"
#include "cuda/tile/need.h"

namespace chiasma::sm90_sparse_fp8_direct {

inline constexpr double kBlockFlop = 2.0 * kMaxHeadsPerCta * kBlockTokens;
// The left operand comes from registers, so that a product reads only b (heads x 16 f16 numbers) from shared memory.
inline constexpr double kRightOperandBytes = kMaxHeadsPerCta * 16 * 2.0;
inline constexpr double kQkProducts = v32::kKeyDim / 16.0;
inline constexpr double kPvProducts = kValueDim / 64.0 * (kBlockTokens / 16.0);
inline constexpr double kProbabilityBytes = kMaxHeadsPerCta * kBlockTokens * 2.0;
inline constexpr double kSumBytes = kMaxHeadsPerCta / 8.0 * kWarpgroupThreads * 8;

inline constexpr std::array<tile::Need, 13> kNeeds = {{
    // Two thread blocks read the same rows, and memory delivers them once.
    {"gather_kv", tile::Resource::kMemory, kBlockTokens / 2.0 * v32::kRowBytes, "dram_read"},
    {"gather_kv", tile::Resource::kGather, kBlockTokens* v32::kRowBytes, "gather_bulk_all_dram"},
    {"gather_kv", tile::Resource::kShared, kBlockTokens* v32::kRowBytes, "shared_store_w8"},
    {"score_qk", tile::Resource::kConvert, kBlockTokens* v32::kNopeDim, "convert_cvt_f16_w8"},
    {"score_qk", tile::Resource::kMatrix, kBlockFlop* v32::kKeyDim, "wgmma_f16_n64_ra_wg2"},
    {"score_qk", tile::Resource::kShared, kBlockTokens*(v32::kNopeDim + 2.0 * kRopeDim), "shared_load_w4"},
    {"score_qk", tile::Resource::kShared, kQkProducts* kRightOperandBytes, "shared_load_w12"},
    {"softmax_step", tile::Resource::kExp2, kMaxHeadsPerCta* kBlockTokens, "exp2_w4"},
    {"softmax_step", tile::Resource::kShared, kProbabilityBytes + 2 * kSumBytes, "shared_store_w4"},
    {"accumulate_pv", tile::Resource::kConvert, kBlockTokens* kValueDim, "convert_prmt_cvt_f16_scale_w8"},
    {"accumulate_pv", tile::Resource::kMatrix, kBlockFlop* kValueDim, "wgmma_f16_n64_ra_wg2"},
    {"accumulate_pv", tile::Resource::kShared, kBlockTokens* kValueDim, "shared_load_w8"},
    {"accumulate_pv", tile::Resource::kShared, kPvProducts* kRightOperandBytes, "shared_load_w12"},
}};

// What must fit whatever the stages do; smem_plan.h and config.h hold the exact sums.
inline constexpr int kRegistersPerSm = 65536;
static_assert(kLaunchRegisters * kThreads <= kRegistersPerSm);
inline constexpr int kSharedBulkBytes =
    kMaxHeadsPerCta * v32::kKeyDim * 2 +
    Config<KvFormat::v32, kMaxHeadsPerCta>::kStages * kBlockTokens * v32::kRowBytes +
    kMathGroups * kMaxHeadsPerCta * kBlockTokens * 2;  // Q, rows, P
static_assert(kSharedBulkBytes <= 227 * 1024);

}  // namespace chiasma::sm90_sparse_fp8_direct
