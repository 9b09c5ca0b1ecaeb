// Stage gather_rows: stored rows from the cache into the swizzled panels that both products read, 16 bytes a copy, with
// no instruction spent on what they hold.
#pragma once

#include "cuda/sm90_sparse_bf16/smem_plan.h"
#include "cuda/sm90_sparse_fp8_direct/walk_rows.cuh"

namespace chiasma::sm90_sparse_bf16 {

// A row's values are two copies of a warp, 512 bytes each; four neighbouring rows' rotary columns are one. PERF: so the
// bytes of a row are asked for together, which memory likes.
template <typename Config>
class Gatherer : direct::RowWalk<Config, SmemPlan<Config>> {
  using Walk = direct::RowWalk<Config, SmemPlan<Config>>;
  using Walk::kRowsAtOnce, Walk::lane_, Walk::smem_, Walk::stage_, Walk::token, Walk::warp_;
  static constexpr int kChunks = tile::kPanelRowBytes / tile::kChunkBytes;  // of a row of a panel
  static constexpr int kPanelsAtOnce = kWarpThreads / kChunks;
  static_assert(kRowsAtOnce == kPanelsAtOnce && kValuePanels % kPanelsAtOnce == 0);

 public:
  using Walk::Walk;

  __device__ void run() {
    Walk::for_each_block([this](const std::byte* row, const direct::PlaneScales<0>& /*none*/) { gather_rows(row); });
  }

 private:
  // row: of the lane's token.
  __device__ void gather_rows(const std::byte* row) {
    const std::uint32_t kv_full = ptx::shared_address(&smem_.kv_full[stage_.index]);
    const std::uint32_t target =
        ptx::shared_address(smem_.kv[stage_.index]) + warp_ * kRowsAtOnce * tile::kPanelRowBytes;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_empty[stage_.index]), stage_.phase ^ 1u);
    if (lane_ < direct::kTokensPerWarp) {
      smem_.valid[stage_.index][token()] = row != direct::masked_row_of<Config>();
      ptx::mbarrier_arrive(kv_full);
    }
#pragma unroll
    for (int part = 0; part < kWarpsPerWarpgroup; ++part) {
      copy_rows(row, part, target + part * direct::kTokensPerWarp * tile::kPanelRowBytes);
    }
    ptx::copy_async_arrive(kv_full);
  }

  // The warp's four rows among the 16 of a part. target: shared address of the first.
  __device__ void copy_rows(const std::byte* row, int part, std::uint32_t target) const {
    const auto own = reinterpret_cast<unsigned long long>(row);
    const int chunk = lane_ % kChunks, of_eight = lane_ / kChunks;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const auto* source = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, own, part * kRowsAtOnce + i)) +
                           lane_ * tile::kChunkBytes;
      const std::uint32_t to = target + of_eight * kPanelBytes + i * tile::kPanelRowBytes +
                               (chunk ^ ((warp_ * kRowsAtOnce + i) % kChunks)) * tile::kChunkBytes;
#pragma unroll
      for (int panel = 0; panel < kValuePanels; panel += kPanelsAtOnce) {
        ptx::copy_async_16(to + panel * kPanelBytes, source + panel * tile::kPanelRowBytes);
      }
    }
    if constexpr (Config::kHasRotaryPanel) {
      const auto* source =
          reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, own, part * kRowsAtOnce + of_eight));
      const std::uint32_t to = target + kValuePanels * kPanelBytes + of_eight * tile::kPanelRowBytes +
                               (chunk ^ ((warp_ * kRowsAtOnce + of_eight) % kChunks)) * tile::kChunkBytes;
      ptx::copy_async_16(to, source + kValuePanels * tile::kPanelRowBytes + chunk * tile::kChunkBytes);
    }
  }
};

}  // namespace chiasma::sm90_sparse_bf16
