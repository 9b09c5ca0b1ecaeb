// A math warpgroup: scores every other block of a piece, and sums its half of the output columns over all blocks.
#pragma once

#include <numbers>

#include "cuda/sm90_sparse_bf16/store_out.cuh"
#include "cuda/sm90_sparse_fp8_direct/load_q.cuh"
#include "cuda/tile/sink.cuh"

namespace chiasma::sm90_sparse_bf16 {

template <typename Config>
class MathGroup {
 public:
  __device__ MathGroup(const SplitParams& params, SmemPlan<Config>& smem)
      : params_(params),
        smem_(smem),
        group_(static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroupThreads))),
        warp_(static_cast<int>(ptx::uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads))),
        query_(ptx::uniform(ptx::shared_address(smem.q))),
        kv_(ptx::uniform(ptx::shared_address(smem.kv))) {}

  __device__ void run() {
    for (;;) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.piece_full[piece_.index]), piece_.phase);
      const direct::Work& work = smem_.work[piece_.index];
      const auto num_blocks = static_cast<std::int32_t>(ptx::uniform(static_cast<std::uint32_t>(work.num_blocks)));
      // Nothing in global memory is touched before the kernel in front of this one is done with it.
      ptx::grid_dependency_wait();
      if (num_blocks == direct::Work::kNoMoreWork) return;
      begin_piece(work);
      bool is_scored = false;
      for (std::int32_t block = 0; block < num_blocks; ++block) {
        if (block % kMathGroups == group_) {
          own_block(is_scored);
          is_scored = false;
        } else {
          is_scored = peer_block(block + 1 < num_blocks);
        }
      }
      exchange_sums();
      store_results(work);
      __syncwarp();
      if (ptx::lane_id_here() == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.piece_empty[piece_.index]));
      piece_.advance();
    }
  }

 private:
  __device__ void begin_piece(const direct::Work& work) {
    direct::load_q<Config>(params_.problem, smem_, work, smem_.first_head, group_ * kWarpsPerWarpgroup + warp_,
                           ptx::lane_id_here());
    // SYNC: the query was written by ordinary stores and is read by the tensor cores.
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      output_reference_[r] = own_reference_[r] = -INFINITY;
      sums_.plain[r] = sums_.rounded[r] = 0.0f;
    }
#pragma unroll
    for (float& value : output_) value = 0.0f;
  }

  // Shared address of a panel of a stage.
  __device__ std::uint32_t panel(std::uint32_t stage, int number) const {
    return kv_ + (stage * kBlockPanels + number) * kPanelBytes;
  }
  __device__ int head_row(int r) const {
    return warp_ * kRowsPerWarp + ptx::lane_id_here() / 4 + 8 * r;
  }

  __device__ void own_block(bool is_scored) {
    if (!is_scored) {
      Scores scores;
      score(scores, stage_);
      make_probabilities(scores, stage_, output_reference_);
    }
    move_output(own_reference_);
#pragma unroll
    for (auto& step : probabilities_) ptx::wgmma_pin(step);
    accumulate_pv(output_, values(), [&](int step) -> const std::uint32_t(&)[4] { return probabilities_[step]; });
    finish_block();
  }

  // A block that the other group scores. Returns whether the own one behind it was scored meanwhile: while there is
  // nothing else to do, and if its rows are there. PERF: to wait for those would keep this block's place, and what is
  // to come into it.
  __device__ bool peer_block(bool has_next) {
    const auto next = stage_.next();
    const std::uint32_t p_full = ptx::shared_address(&smem_.p_full[stage_.index]);
    Scores scores;
    const bool goes_ahead =
        has_next && ptx::named_barrier_any(
                        kGroupBarrier + group_, kWarpgroupThreads,
                        !ptx::mbarrier_test_wait(p_full, stage_.phase) &&
                            ptx::mbarrier_test_wait(ptx::shared_address(&smem_.kv_full[next.index]), next.phase));
    if (goes_ahead) score(scores, next);
    ptx::mbarrier_wait(p_full, stage_.phase);
    // SYNC: as the owner did for the rows, and for them again.
    ptx::fence_proxy_async();
    OfHeads reference;
#pragma unroll
    for (int r = 0; r < 2; ++r) reference[r] = smem_.reference[stage_.index][head_row(r)];
    move_output(reference);
    const std::uint64_t p = tile::descriptor(panel(stage_.index, kProbabilityPanel), 0, tile::kAtomBytes);
    accumulate_pv(output_, values(), [&](int step) { return tile::advance(p, step * kProbabilityStepUnits); });
    finish_block();
    if (goes_ahead) make_probabilities(scores, stage_, reference);
    return goes_ahead;
  }

  // Shared address of the group's columns of the oldest block.
  __device__ std::uint32_t values() const {
    return panel(stage_.index, group_ * kPanelsPerGroup);
  }

  // Products of the oldest block are done, and its place is given back.
  __device__ void finish_block() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(output_);
    if (ptx::lane_id_here() == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.kv_empty[stage_.index]));
    stage_.advance();
  }

  __device__ void score(Scores& scores, const Ring<kStages>& ring) {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_full[ring.index]), ring.phase);
    // SYNC: rows were written by copies of the ordinary kind.
    ptx::fence_proxy_async();
    score_qk<Config>(scores, query_, panel(ring.index, 0));
  }

  // Scores of a block of this group to P, references and sums. reference: after the block before.
  __device__ void make_probabilities(Scores& scores, const Ring<kStages>& ring, const OfHeads& before) {
    OfHeads reference = {before[0], before[1]};
    const OfHeads factor = {smem_.head[head_row(0)].factor, smem_.head[head_row(1)].factor};
    weigh_scores(scores, reference, smem_.valid[ring.index], factor, ptx::lane_id_here());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float by = ptx::exp2_approx(own_reference_[r] - finite_or_zero(reference[r]));
      sums_.plain[r] *= by;
      sums_.rounded[r] *= by;
      own_reference_[r] = reference[r];
    }
    exponentiate(probabilities_, scores, sums_, reference);
    // The group's other warps may still score with the rotary keys, in whose place P goes.
    if constexpr (Config::kHasRotaryPanel) ptx::named_barrier_sync(kGroupBarrier + group_, kWarpgroupThreads);
    store_probabilities(probabilities_, panel(ring.index, kProbabilityPanel), warp_, ptx::lane_id_here());
    if (ptx::lane_id_here() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) smem_.reference[ring.index][head_row(r)] = reference[r];
    }
    // SYNC: P was written by ordinary stores and is read by the tensor cores.
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(ptx::shared_address(&smem_.p_full[ring.index]));
  }

  // Accumulators become relative to these references. Seldom does anything.
  __device__ void move_output(const OfHeads& reference) {
    const bool moved = reference[0] != output_reference_[0] || reference[1] != output_reference_[1];
    if (!__any_sync(0xffffffffu, moved)) return;
    OfHeads by;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      by[r] = reference[r] == output_reference_[r]
                  ? 1.0f
                  : ptx::exp2_approx(output_reference_[r] - finite_or_zero(reference[r]));
      output_reference_[r] = reference[r];
    }
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Output) / sizeof(float)); ++i) output_[i] *= by[i / 2 % 2];
  }

  // Each group summed the blocks it scored; both need the whole.
  __device__ void exchange_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float by = ptx::exp2_approx(finite_or_zero(own_reference_[r]) - finite_or_zero(output_reference_[r]));
      const float2 own = make_float2(quad_sum(sums_.plain[r]), quad_sum(sums_.rounded[r]));
      // Without a reference there is nothing, or NaN.
      const bool is_plain = own_reference_[r] == -INFINITY;
      if (ptx::lane_id_here() % 4 == 0) {
        smem_.sums[group_][head_row(r)] = is_plain ? own : make_float2(own.x * by, own.y * by);
      }
    }
    __syncwarp();
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
  }

  __device__ void store_results(const direct::Work& work) {
    const DecodeProblem& problem = params_.problem;
    const bool is_whole_row = work.piece.slot == tile::Piece::kWholeRow;
    const int first_column = group_ * kColumnsPerGroup;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = head_row(r), head = smem_.first_head + row;
      const bool exists = head < problem.h_q;
      const float2 left = smem_.sums[0][row], right = smem_.sums[1][row];
      const float sum = left.x + right.x;
      const bool is_empty = output_reference_[r] == -INFINITY && sum == 0.0f;
      const float lse =
          is_empty ? -INFINITY : (finite_or_zero(output_reference_[r]) + log2f(sum)) * std::numbers::ln2_v<float>;
      float multiplier = is_empty ? 0.0f : 1.0f / (left.y + right.y);
      const bool writes_lse = exists && group_ == 0 && ptx::lane_id_here() % 4 == 0;
      if (is_whole_row) {
        if (writes_lse) {
          problem.lse[work.request * problem.lse_stride_b + work.query_token * problem.lse_stride_s +
                      head * problem.lse_stride_h] = lse;
        }
        if (exists && problem.attn_sink != nullptr) {
          multiplier *= tile::sink_multiplier(lse, problem.attn_sink[head * problem.attn_sink_stride]);
        }
        bf16_t* columns = problem.out + work.request * problem.out_stride_b + work.query_token * problem.out_stride_s +
                          head * problem.out_stride_h + first_column;
        store_head<Config::kVectors>(output_, columns, multiplier, r, ptx::lane_id_here(), exists);
      } else if (exists) {
        const std::int64_t at = std::int64_t{work.piece.slot} * problem.h_q + head;
        if (writes_lse) params_.part_lse[at] = lse;
        store_head(output_, params_.part_out + at * kValueDim + first_column, multiplier, r, ptx::lane_id_here());
      }
    }
  }

  const SplitParams& params_;
  SmemPlan<Config>& smem_;
  int group_, warp_;
  std::uint32_t query_, kv_;  // shared addresses, the same in all lanes as far as the compiler knows
  Ring<kStages> stage_;       // of the oldest block that is not accumulated
  Ring<kPieceSlots> piece_;
  OfHeads output_reference_, own_reference_;  // of accumulators; of sums and P of the last block that this group scored
  Sums sums_;                                 // of this thread's tokens
  Probabilities probabilities_;
  Output output_;
};

}  // namespace chiasma::sm90_sparse_bf16
