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
      : params_(params),
        smem_(smem),
        warp_(static_cast<int>(ptx::uniform(threadIdx.x / kWarpThreads)) - kMathThreads / kWarpThreads),
        lane_(threadIdx.x % kWarpThreads),
        cursor_(params, smem) {}

  // Rows are loaded once those before are converted, brought into L2 a step earlier, and their indices loaded another
  // step earlier, so that nothing waits for memory but the rows' last hop. PERF: a second set of registers for the
  // rows, loaded a step earlier, is slower: hardware counts outstanding loads together, so that the wait for the older
  // rows becomes one for the newer, too.
  __device__ void run() {
    // The steps after the current one: the indices of the lane's rows, and whether there are such steps.
    cursor_.advance();
    bool valid = cursor_.valid();
    GatheredRows rows;
    gather_rows(rows, params_, load_index(), lane_);
    bool valid1 = advance();
    std::int32_t index1 = load_index();
    bool valid2 = advance();
    std::int32_t index2 = load_index();
    prefetch_row(row_address(params_, index1), lane_);
    for (std::uint32_t step = 0; valid; ++step) {
      convert(rows, step);
      gather_rows(rows, params_, index1, lane_);
      prefetch_row(row_address(params_, index2), lane_);
      valid = valid1;
      valid1 = valid2;
      index1 = index2;
      valid2 = advance();
      index2 = load_index();
    }
  }

 private:
  static constexpr bool kCrossover = Variant::kClusterSize > 1;
  static constexpr int kRowsPerBlock = kBlockTokens / Variant::kClusterSize;
  static constexpr int kStepsPerBlock = kRowsPerBlock / kStepRows;

  __device__ std::int32_t load_index() { return cursor_.load_index((threadIdx.x - kMathThreads) / kLanesPerRow); }

  // Whether there is a further step.
  __device__ bool advance() {
    if (cursor_.valid()) cursor_.advance();
    return cursor_.valid();
  }

  __device__ void convert(GatheredRows& rows, std::uint32_t step) {
    const std::uint32_t block = step / kStepsPerBlock;
    const int step_in_block = static_cast<int>(step % kStepsPerBlock);
    const std::uint32_t stage = block % kStages;
    const int first_row = kCrossover ? ptx::cluster_block_rank() * kRowsPerBlock : 0;
    const int first_tile_row = first_row + step_in_block * kStepRows + warp_ * kRowsPerWarp;
    const TileTarget target{ptx::shared_address(smem_.kv[stage]) + first_tile_row * tile::kPanelRowBytes,
                            ptx::shared_address(&smem_.tokens[stage][first_tile_row / kGroupTokens])};
    const int row_in_atom = warp_ % 2 * kRowsPerWarp;
    const bool ends_block = step_in_block == kStepsPerBlock - 1;
    std::uint32_t spoilt = 0;
    if (!all_finite(rows)) spoilt = take_out_spoilt(rows.scales);
    const RowExponents exponents = find_exponents(rows.scales, rows.rope);
    if (step_in_block == 0) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_empty[stage]), block / kStages % 2 ^ 1u);
    }
    store_scales(rows.scales, rows.valid, exponents, target, lane_);
    dequantize_half<0>(rows, spoilt, target, row_in_atom, lane_);
    commit_half<0>(target, &smem_.kv_full[stage][0], ends_block);
    dequantize_half<1>(rows, spoilt, target, row_in_atom, lane_);
    dequantize_rope(rows.rope, exponents, target, row_in_atom, lane_);
    commit_half<1>(target, &smem_.kv_full[stage][1], ends_block);
  }

  // Half of the columns of the warp's rows lie in shared memory.
  // SYNC: they were written by ordinary stores and are read by the tensor cores and the copy engine.
  template <int kHalf>
  __device__ void commit_half(const TileTarget& target, std::uint64_t* barrier, bool ends_block) {
    if (!kCrossover && !ends_block) return;
    const std::uint32_t kv_full = ptx::shared_address(barrier);
    ptx::fence_proxy_async();
    __syncwarp();
    if constexpr (kCrossover) send_to_peer<kHalf>(target, kv_full);
    if (lane_ != 0) return;
    if constexpr (kCrossover) {
      ptx::mbarrier_arrive_expect_tx(kv_full, kPeerBytes<kHalf>);
    } else {
      ptx::mbarrier_arrive(kv_full);
    }
  }

  // The crossover: the rows, contiguous in every panel, go to the other block by the copy engine, which needs no thread
  // while it works and counts what arrived on the other block's kv_full. Scales go along with the first half.
  template <int kHalf>
  __device__ void send_to_peer(const TileTarget& target, std::uint32_t kv_full) {
    if (!ptx::elect_lane()) return;
    const std::uint32_t peer_kv_full = ptx::map_to_peer(kv_full, ptx::cluster_block_rank() ^ 1u);
    const std::uint32_t to_peer = peer_kv_full - kv_full;
    // PERF: one lane after the other would take a loop that finds them.
    constexpr int kPanels = kHalfPanels + kHalf;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const std::uint32_t from = target.rows + (kHalf * kHalfPanels + panel) * kPanelBytes;
      ptx::copy_bulk_to_peer(from + to_peer, from, kRowsPerWarp * tile::kPanelRowBytes, peer_kv_full);
    }
    if constexpr (kHalf == 0) {
      ptx::copy_bulk_to_peer(target.scales + to_peer, target.scales, sizeof(TokenGroup), peer_kv_full);
    }
  }

  const Params& params_;
  SmemPlan& smem_;
  int warp_, lane_;
  StepCursor<kRowsPerBlock> cursor_;
};

}  // namespace chiasma::sm90_sparse_fp8
