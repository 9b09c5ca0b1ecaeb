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

  // While a step is converted the rows of the next one are brought into L2; they are loaded once it is done, with the
  // indices of the step behind. PERF: a second set of registers for the rows, loaded a step earlier, is slower:
  // hardware counts outstanding loads together, so that the wait for the older rows becomes one for the newer, too.
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
    gather_rows(rows, RowAddresses::resolve(kv_, index_), lane_);
    if (cursor_.valid()) cursor_.advance();
    load_index();
  }

  __device__ void convert(const GatheredRows& rows, std::uint32_t step) {
    // Resolved twice, here and for the loads: a division is cheaper than registers that hold addresses meanwhile.
    prefetch_rows(RowAddresses::resolve(kv_, index_), lane_);
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
    dequantize_rows(rows, target, warp_ * kRowsPerWarp % tile::kAtomRows, lane_, [&](int first) {
      if constexpr (kCrossover) send_to_peer(target, kv_full, first);
    });
    if (step_in_block != kStepsPerBlock - 1) return;
    // SYNC: no proxy fence for this block's own readers. The math warps have one behind their wait, where no loads are
    // under way that it would wait for as well.
    __syncwarp();
    if (lane_ != 0) return;
    if constexpr (kCrossover) {
      ptx::mbarrier_arrive_expect_tx(kv_full, kRowsPerWarp * kPeerRowBytes);
    } else {
      ptx::mbarrier_arrive(kv_full);
    }
  }

  // The crossover: rows [first, first + kRowsPerSend) of the warp, contiguous in every panel, go to the other block by
  // the copy engine, which needs no thread while it works and counts what arrived on the other block's kv_full. RoPE
  // values and weights of all rows go along with the first.
  __device__ void send_to_peer(const TileTarget& target, std::uint32_t kv_full, int first) {
    ptx::fence_proxy_async();
    __syncwarp();
    const int pieces = first == 0 ? kKeyPanels + 1 : kRopePanel;
    if (lane_ >= pieces) return;
    const std::uint32_t peer_kv_full = ptx::map_to_peer(kv_full, ptx::cluster_block_rank() ^ 1u);
    std::uint32_t from = target.rows + lane_ * kPanelBytes + first * tile::kPanelRowBytes;
    std::uint32_t bytes = kRowsPerSend * tile::kPanelRowBytes;
    if (lane_ == kRopePanel) bytes = kRowsPerWarp * tile::kPanelRowBytes;
    if (lane_ == kKeyPanels) {
      from = target.weights;
      bytes = kRowsPerWarp * sizeof(TokenWeight);
    }
    ptx::copy_bulk_to_peer(from + (peer_kv_full - kv_full), from, bytes, peer_kv_full);
  }

  const KvPool& kv_;
  SmemPlan& smem_;
  int warp_, lane_;
  StepCursor<kRowsPerBlock> cursor_;
  std::int32_t index_;
};

}  // namespace chiasma::sm90_sparse_fp8
