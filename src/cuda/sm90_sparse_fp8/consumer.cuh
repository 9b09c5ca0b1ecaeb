// A math warpgroup: scores every second block, accumulates half of the output columns over all blocks.
#pragma once

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8/load_q.cuh"
#include "cuda/sm90_sparse_fp8/store_out.cuh"

namespace chiasma::sm90_sparse_fp8 {

template <typename Variant>
class Consumer {
 public:
  __device__ Consumer(const Params& params, SmemPlan& smem)
      : params_(params),
        smem_(smem),
        warpgroup_(threadIdx.x / kWarpgroupThreads),
        warp_(threadIdx.x % kWarpgroupThreads / kWarpThreads),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void run() {
    if (threadIdx.x == 0) smem_.work_cursor = {params_.schedule.first_unit(smem_.group)};
    for (std::uint32_t piece = 0;; ++piece) {
      const std::uint32_t slot = piece % 2;
      if (threadIdx.x == 0) {
        smem_.has_work[slot] = next_work(params_, smem_.group, smem_.work_cursor, &smem_.work[slot]);
      }
      // Everybody knows the work, and is done with the last piece's query and sums.
      ptx::named_barrier_sync(kMathBarrier, kMathThreads);
      if (!smem_.has_work[slot]) return;
      const Work& work = smem_.work[slot];
      load_query(work);
      accumulate_piece(work.end_block - work.piece.first_block);
      exchange_sums();
      store_out(output_, params_, smem_, state_, work, smem_.first_head, warpgroup_, warp_, lane_);
    }
  }

 private:
  __device__ void load_query(const Work& work) {
    load_q(params_.problem, smem_, work, smem_.first_head, warpgroup_ * kWarpsPerWarpgroup + warp_, lane_);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
    state_.reset();
#pragma unroll
    for (OutputTile& tile : output_) {
#pragma unroll
      for (float& value : tile) value = 0.0f;
    }
  }

  // Blocks alternate between the warpgroups. While one scores and softmaxes its block, the other multiplies.
  __device__ void accumulate_piece(std::int32_t num_blocks) {
    const std::uint32_t end = block_ + (num_blocks > 0 ? num_blocks : 0);
    for (; block_ < end; ++block_) {
      if (block_ % kMathWarpgroups == static_cast<std::uint32_t>(warpgroup_)) {
        own_block();
      } else {
        peer_block();
      }
    }
  }

  __device__ void own_block() {
    const std::uint32_t stage = block_ % kStages;
    const std::uint32_t parity = block_ / kStages % 2;
    ScoreTile scores;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_full[stage]), parity);
    // SYNC: the rows were written by ordinary stores and are read by the tensor cores.
    ptx::fence_proxy_async();
    score_qk(scores, smem_, stage);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(scores);

    Probabilities probabilities;
    const Rescale rescale = softmax_step(scores, state_, probabilities, smem_, stage, warp_, lane_);
    publish_p(probabilities, state_, smem_, stage, warp_, lane_);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.p_full[stage]));

    apply(rescale, output_);
    accumulate_own_p(output_, probabilities, smem_, stage, warpgroup_);
    wait_for_pv(output_);
    release(stage);
  }

  __device__ void peer_block() {
    const std::uint32_t stage = block_ % kStages;
    const std::uint32_t parity = block_ / kStages % 2;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.p_full[stage]), parity);
    const int row = warp_ * 16 + lane_ / 4;
    const float reference[2] = {smem_.reference[stage][row], smem_.reference[stage][row + 8]};
    const Rescale rescale = move_reference(state_, reference, smem_.factor_reference[stage]);
    ptx::fence_proxy_async();
    apply(rescale, output_);
    accumulate_peer_p(output_, smem_, stage, warpgroup_);
    wait_for_pv(output_);
    release(stage);
  }

  // This warp reads the stage no more, in every block that fills it.
  __device__ void release(std::uint32_t stage) {
    if (lane_ != 0) return;
    const std::uint32_t kv_empty = ptx::shared_address(&smem_.kv_empty[stage]);
    ptx::mbarrier_arrive(kv_empty);
    if constexpr (Variant::kClusterSize > 1) {
      ptx::mbarrier_arrive_cluster(ptx::map_to_peer(kv_empty, ptx::cluster_block_rank() ^ 1u));
    }
  }

  // Each warpgroup summed the blocks it owned; both need the whole.
  __device__ void exchange_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = state_.sum[r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane_ % 4 == 0) smem_.row_sum[warpgroup_][warp_ * 16 + lane_ / 4 + 8 * r] = sum;
    }
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
  }

  const Params& params_;
  SmemPlan& smem_;
  int warpgroup_, warp_, lane_;
  std::uint32_t block_ = 0;  // blocks of this thread block so far, over all pieces
  SoftmaxState state_;
  OutputTile output_[kOutputTiles];
};

}  // namespace chiasma::sm90_sparse_fp8
