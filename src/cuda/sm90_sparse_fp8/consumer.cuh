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
        // PERF: so that descriptors live in uniform registers.
        warpgroup_(static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroupThreads))),
        warp_(threadIdx.x % kWarpgroupThreads / kWarpThreads),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void run() {
    if (threadIdx.x == 0) smem_.work_cursor = {params_.schedule.first_unit(smem_.group)};
    std::uint32_t slot = 0;
    while (next_piece(slot)) {
      load_query(smem_.work[slot]);
      accumulate_piece(slot);
      exchange_sums();
      // Read back: the loop over the blocks needs all registers.
      slot = progress().slot;
      store_out(output_, params_, smem_, state_, smem_.work[slot], smem_.first_head, warpgroup_, warp_, lane_);
      slot ^= 1;
    }
  }

 private:
  static constexpr bool kCrossover = Variant::kClusterSize > 1;
  // Whether the other warpgroup's block comes before the own one's scores or between their halves. PERF: 3 % of
  // crossover, whose tiles are there early (H200, 2026-11-30); baseline waits for its tiles anyway.
  static constexpr bool kPeerFirst = !kCrossover;

  // Everybody knows the work, and is done with the last piece's query and sums.
  __device__ bool next_piece(std::uint32_t slot) {
    if (threadIdx.x == 0) {
      smem_.has_work[slot] = next_work(params_, smem_.group, smem_.work_cursor, &smem_.work[slot]);
    }
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
    return smem_.has_work[slot];
  }

  __device__ volatile PieceProgress& progress() { return smem_.progress[warpgroup_]; }

  __device__ void load_query(const Work& work) {
    if (threadIdx.x == 0) smem_.far_units = smem_.any_valid = 0;
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

  // Blocks alternate between the warpgroups. While one softmaxes its block, the other scores the first half of the next
  // one's columns (crossover), or waits (baseline), and multiplies the former's as soon as its P is there.
  __device__ void accumulate_piece(std::uint32_t slot) {
    const Work& work = smem_.work[slot];
    if (threadIdx.x % kWarpgroupThreads == 0) {
      progress().end_block = block_ + max(work.end_block - work.piece.first_block, 0);
      progress().slot = slot;
    }
    ptx::named_barrier_sync(kOwnerBarrier + warpgroup_, kWarpgroupThreads);
    while (block_ < progress().end_block) {
      bool peer_waits = block_ % kMathWarpgroups != static_cast<std::uint32_t>(warpgroup_);
      if (peer_waits) ++block_;
      const bool has_own = block_ < progress().end_block;
      if (peer_waits && (!has_own || kPeerFirst)) {
        peer_block();
        peer_waits = false;
      }
      if (!has_own) return;
      own_block(peer_waits);
      ++block_;
    }
  }

  // peer_waits: the block before is still to be multiplied here. That happens between the halves of this one's scores.
  __device__ void own_block(bool peer_waits) {
    const std::uint32_t stage = block_ % kStages;
    ScoreTile scores;
    score_first_half(scores, smem_, stage, parity_of(block_), lane_);
    if (peer_waits) peer_block();
    score_second_half(scores, smem_, stage, parity_of(block_), warpgroup_, warp_, lane_);
    const float scale[2] = {head_scale(smem_, params_.problem.sm_scale, head_row()),
                            head_scale(smem_, params_.problem.sm_scale, head_row() + 8)};
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(scores);
    float most[2];
    weigh_scores(scores, most, smem_.tokens[stage], scale, lane_);
    raise_reference(state_, output_, most, smem_.far_units);
    Exponentials exponentials;
    exponentiate(exponentials, scores, state_, smem_, stage, warp_, lane_);
    Probabilities probabilities[kOutputTiles];
    publish_p(probabilities, exponentials, state_, smem_, stage, warp_, lane_);
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(ptx::shared_address(&smem_.p_full[stage]));
    accumulate_own_p(output_, probabilities, smem_, stage, warpgroup_);
    wait_for_pv(output_);
    release(stage);
  }

  __device__ void peer_block() {
    const std::uint32_t peer = block_ - 1;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.p_full[peer % kStages]), parity_of(peer));
    const float reference[2] = {smem_.reference[head_row()], smem_.reference[head_row() + 8]};
    move_reference(state_, output_, reference, smem_.far_units);
    accumulate_peer_p(output_, smem_, peer % kStages, warpgroup_);
    wait_for_pv(output_);
    release(peer % kStages);
  }

  __device__ static std::uint32_t parity_of(std::uint32_t block) {
    return block / kStages % 2;
  }
  __device__ int head_row() const {
    return warp_ * 16 + lane_ / 4;
  }

  // This warp reads the stage no more, in every block that fills it.
  __device__ void release(std::uint32_t stage) {
    if (lane_ != 0) return;
    const std::uint32_t kv_empty = ptx::shared_address(&smem_.kv_empty[stage]);
    ptx::mbarrier_arrive(kv_empty);
    if constexpr (kCrossover) {
      ptx::mbarrier_arrive_cluster(ptx::map_to_peer(kv_empty, ptx::cluster_block_rank() ^ 1u));
    }
  }

  // Each warpgroup summed the blocks it owned; both need the whole.
  __device__ void exchange_sums() {
    // P is read no more.
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = state_.sum[r];
      const bool is_low = sum < 0.0f;
      const float2 both = make_float2(quad_sum(is_low ? 0.0f : sum), quad_sum(is_low ? -sum : 0.0f));
      if (lane_ % 4 == 0) row_sum(smem_, warpgroup_, head_row() + 8 * r) = both;
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
