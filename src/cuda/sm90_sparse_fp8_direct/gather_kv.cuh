// Stage gather_kv: stored rows from the cache into shared memory, as they are. Accumulation hands the places of a
// block's rows back 16 by 16, and every warp of the gatherer fills four of each 16, so that all of them are at work at
// once.
#pragma once

#include "cuda/sm90_sparse_fp8_direct/walk_rows.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

template <typename Config>
class Gatherer : RowWalk<Config, SmemPlan<Config>> {
  using Walk = RowWalk<Config, SmemPlan<Config>>;
  using Walk::kRowsAtOnce, Walk::lane_, Walk::smem_, Walk::stage_, Walk::token, Walk::warp_;

 public:
  using Walk::Walk;

  __device__ void run() {
    Walk::for_each_block(
        [this](const std::byte* row, const PlaneScales<Config::kPlaneBytes>& scales) { gather_rows(row, scales); });
  }

 private:
  // row, scales: of the lane's token.
  __device__ void gather_rows(const std::byte* row, const PlaneScales<Config::kPlaneBytes>& scales) {
    const std::uint32_t kv_full = ptx::shared_address(&smem_.kv_full[stage_.index]);
#pragma unroll
    for (int part = 0; part < kWarpsPerWarpgroup; ++part) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_empty[stage_.index][part]), stage_.phase ^ 1u);
      if (part == 0) {
        // Nobody asks for the last block's validity any more once its accumulation has begun.
        if (lane_ < kTokensPerWarp) {
          smem_.valid[stage_.index][token()] = row != masked_row_of<Config>();
          if constexpr (Config::kPlaneBytes > 0) store_scales(scales);
          ptx::mbarrier_arrive_expect_tx(kv_full, Config::kCopyBytes);
        }
        __syncwarp();
      }
      copy_rows(row, part, kv_full);
    }
  }

  // SYNC: rows of the whole stage are free only part by part, but nobody asks for the scales behind them any more once
  // the first part is: they were taken before the accumulation of the block began.
  __device__ void store_scales(const PlaneScales<Config::kPlaneBytes>& scales) const {
    std::uint8_t* to = smem_.rows[stage_.index].row[token()] + Config::kScalesOffset;
#pragma unroll
    for (int i = 0; i < Config::kPlaneBytes / 4; ++i) reinterpret_cast<std::uint32_t*>(to)[i] = scales.word[i];
  }

  // One lane copies for all, with addresses that are the same in all lanes. A copy a lane would become a loop over
  // lanes, which is more code, if no slower: a copy keeps its warp busy for 115 clk in any case (H200, 2026-11-30).
  __device__ void copy_rows(const std::byte* row, int part, std::uint32_t kv_full) {
    const int first_token = part * kTokensPerWarp + warp_ * kRowsAtOnce;
    const std::uint32_t target = ptx::shared_address(smem_.rows[stage_.index].row[first_token]);
    const std::byte* source[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      source[i] = reinterpret_cast<const std::byte*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), part * kRowsAtOnce + i));
    }
    if (!ptx::elect_lane()) return;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      ptx::copy_bulk_from_global(target + i * Config::kPitch, source[i], Config::kCopyBytes, kv_full);
    }
  }
};

}  // namespace chiasma::sm90_sparse_fp8_direct
