// The producer warps: gather and dequantise the blocks of all pieces, one after the other, as fast as stages become
// free.
#pragma once

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8/dequantize_kv.cuh"

namespace chiasma::sm90_sparse_fp8 {

template <typename Variant>
class Producer {
 public:
  __device__ Producer(const Params& params, SmemPlan& smem)
      : kv_(params.problem.kv),
        smem_(smem),
        warp_((threadIdx.x - kMathThreads) / kWarpThreads),
        lane_(threadIdx.x % kWarpThreads),
        cursor_(params, smem) {}

  // A step's indices are loaded while the rows of the step before it are converted; its rows once that is done. PERF: a
  // second set of registers for the rows, loaded a step earlier, is slower: hardware counts outstanding loads together,
  // so that the wait for the older rows becomes one for the newer, too.
  __device__ void run() {
    cursor_.advance();
    load_index();
    GatheredRows rows;
    bool valid = cursor_.valid();
    gather_next(rows);
    for (std::uint32_t step = 0; valid; ++step) {
      valid = cursor_.valid();
      convert(rows, step);
      gather_next(rows);
    }
  }

 private:
  static constexpr bool kCrossover = Variant::kClusterSize > 1;
  static constexpr int kRowsPerBlock = kBlockTokens / Variant::kClusterSize;
  static constexpr int kStepsPerBlock = kRowsPerBlock / kStepRows;

  __device__ void load_index() { index_ = cursor_.load_index(warp_ * kRowsPerWarp + lane_ % kRowsPerWarp); }

  // Issues the loads of the rows that the last indices name, and of the indices behind those.
  __device__ void gather_next(GatheredRows& rows) {
    const RowAddresses addresses = RowAddresses::resolve(kv_, index_);
    if (cursor_.valid()) cursor_.advance();
    load_index();
    gather_rows(rows, addresses, lane_);
  }

  __device__ void convert(const GatheredRows& rows, std::uint32_t step) {
    const std::uint32_t block = step / kStepsPerBlock;
    const int step_in_block = static_cast<int>(step % kStepsPerBlock);
    const std::uint32_t stage = block % kStages;
    const std::uint32_t kv_full = ptx::shared_address(&smem_.kv_full[stage]);
    const int first_tile_row = smem_.first_row + step_in_block * kStepRows + warp_ * kRowsPerWarp;
    if (step_in_block == 0) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_empty[stage]), block / kStages % 2 ^ 1u);
    }
    const TileTarget target{ptx::shared_address(smem_.kv[stage]) + first_tile_row * tile::kPanelRowBytes,
                            ptx::shared_address(&smem_.token[stage][first_tile_row])};
    dequantize_rows(rows, target, warp_ * kRowsPerWarp % tile::kAtomRows, lane_);
    if constexpr (kCrossover) {
      send_to_peer(stage, kv_full);
      if (lane_ == 0) ptx::mbarrier_arrive_expect_tx(kv_full, kRowsPerWarp * kPeerRowBytes);
    } else if (step_in_block == kStepsPerBlock - 1) {
      // SYNC: no proxy fence here. The math warps have one behind their wait, where no loads are under way that it
      // would wait for as well.
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(kv_full);
    }
  }

  // The crossover: this block's half of a tile, a contiguous part of every panel, goes to the other block by the copy
  // engine, which needs no thread while it works and counts what arrived on the other block's kv_full.
  __device__ void send_to_peer(std::uint32_t stage, std::uint32_t kv_full) {
    static_assert(kStepsPerBlock == 1 || !kCrossover, "a step is what one copy of a panel carries");
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kProducerBarrier, kProducerWarps * kWarpThreads);
    if (warp_ != 0 || lane_ > kKeyPanels) return;
    const std::uint32_t peer_kv_full = ptx::map_to_peer(kv_full, ptx::cluster_block_rank() ^ 1u);
    const std::uint32_t to_peer = peer_kv_full - kv_full;
    if (lane_ < kKeyPanels) {
      const std::uint32_t rows = ptx::shared_address(smem_.kv[stage][lane_]) + smem_.first_row * tile::kPanelRowBytes;
      ptx::copy_bulk_to_peer(rows + to_peer, rows, kStepRows * tile::kPanelRowBytes, peer_kv_full);
    } else {
      const std::uint32_t weights = ptx::shared_address(&smem_.token[stage][smem_.first_row]);
      ptx::copy_bulk_to_peer(weights + to_peer, weights, kStepRows * sizeof(TokenWeight), peer_kv_full);
    }
  }

  const KvPool& kv_;
  SmemPlan& smem_;
  int warp_, lane_;
  StepCursor<kRowsPerBlock> cursor_;
  std::int32_t index_;
};

}  // namespace chiasma::sm90_sparse_fp8
