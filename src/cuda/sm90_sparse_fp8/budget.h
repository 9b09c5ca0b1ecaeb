// What a block costs each resource of a multiprocessor, by stage, with 128 heads (two thread blocks share a query
// token). Not in it: what is needed once a row (load_q, store_out) and waiting.
#pragma once

#include <array>

#include "cuda/sm90_sparse_fp8/config.h"
#include "cuda/tile/need.h"

namespace chiasma::sm90_sparse_fp8 {

inline constexpr double kF16Bytes = 2;
inline constexpr double kTileBytes = kBlockTokens * v32::kKeyDim * kF16Bytes;
inline constexpr double kScoreBytes = kHeadsPerCta * kBlockTokens * kF16Bytes;

// One wgmma reads both operands from shared memory each time: a (64 rows) and b (n rows) of 16 columns.
constexpr double operand_bytes(int rows) {
  return rows * 16 * kF16Bytes;
}
inline constexpr double kQkSharedBytes =
    v32::kKeyDim / 16.0 * (operand_bytes(kHeadsPerCta) + operand_bytes(kBlockTokens));
// P of a block is read from shared memory by the warpgroups that did not compute it, once for each product of 128
// columns.
inline constexpr double kPvColumns = 128;
// What goes to another warpgroup is one P for each scale tile of its columns.
inline constexpr double kScaleColumns = v32::kTileDim;
inline constexpr double kOtherColumns = kValueDim - kColumnsPerWarpgroup;
inline constexpr double kPvSharedBytes =
    kBlockTokens / 16.0 *
    (operand_bytes(kValueDim) +
     (kMathWarpgroups - 1) * (kColumnsPerWarpgroup / kPvColumns) * operand_bytes(kHeadsPerCta));

template <typename Variant>
constexpr std::array<tile::Need, 13> block_needs() {
  using enum tile::Resource;
  constexpr bool kCrossover = Variant::kClusterSize > 1;
  constexpr int kOwnRows = kBlockTokens / Variant::kClusterSize;
  constexpr double kOwnBytes = kTileBytes / Variant::kClusterSize;
  constexpr double kExchanged = kCrossover ? kOwnBytes : 0;
  constexpr double kFlop = 2.0 * kHeadsPerCta * kBlockTokens;
  return {{
      // With 128 heads two thread blocks read the same rows, and memory delivers them once.
      {"gather_kv", kMemory, kBlockTokens / 2.0 * v32::kRowBytes, "dram_read"},
      {"gather_kv", kGather, kOwnRows * v32::kRowBytes,
       kCrossover ? "gather_load_half_t256_dram" : "gather_load_all_t256_dram"},
      {"dequantize_kv", kConvert, kOwnRows * v32::kNopeDim, "convert_cvt_f16_w8"},
      {"dequantize_kv", kConvert, kOwnRows * kRopeDim, "convert_cvt_f32_scale_bf16_w8"},
      {"dequantize_kv", kShared, kOwnBytes, "shared_store_w8"},
      {"send_to_peer", kExchange, kExchanged, "dsm_bulk_512_w8_l8"},
      {"send_to_peer", kShared, 2 * kExchanged, "shared_store_w8"},  // read for the peer, and what the peer stores
      {"score_qk", kMatrix, kFlop * v32::kKeyDim, "wgmma_f16_n64_wg2"},
      {"score_qk", kShared, kQkSharedBytes, "shared_load_w12"},
      {"softmax_step", kExp2, kHeadsPerCta * kBlockTokens, "exp2_w8"},
      {"softmax_step", kShared, kOtherColumns / kScaleColumns * kScoreBytes, "shared_store_w8"},
      {"accumulate_pv", kMatrix, kFlop * kValueDim, "wgmma_f16_n128_wg2"},
      {"accumulate_pv", kShared, kPvSharedBytes, "shared_load_w12"},
  }};
}

inline constexpr auto kCrossoverNeeds = block_needs<Crossover>();
inline constexpr auto kBaselineNeeds = block_needs<Baseline>();

// What must fit whatever the stages do; smem_plan.h and config.h hold the exact sums.
inline constexpr int kRegistersPerSm = 65536;
static_assert(kLaunchRegisters * kThreads <= kRegistersPerSm);
inline constexpr double kSharedTileBytes = kHeadsPerCta * v32::kKeyDim * kF16Bytes + kStages * kTileBytes +
                                           kScoreBytes;  // Q, K and V, P, whose rest lies in them
static_assert(kSharedTileBytes <= 227 * 1024);

}  // namespace chiasma::sm90_sparse_fp8
