// A math warpgroup: scores every other block of a piece, and sums its half of the output columns over all blocks.
#pragma once

#include <cmath>
#include <numbers>

#include "cuda/sm90_sparse_fp8_direct/load_q.cuh"
#include "cuda/sm90_sparse_fp8_direct/prepare_factors.cuh"
#include "cuda/sm90_sparse_fp8_direct/softmax_step.cuh"
#include "cuda/sm90_sparse_fp8_direct/store_out.cuh"
#include "cuda/tile/sink.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

template <typename Config>
class MathGroup {
 public:
  __device__ MathGroup(const SplitParams& params, SmemPlan<Config>& smem)
      : params_(params),
        smem_(smem),
        group_(static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroupThreads))),
        warp_(static_cast<int>(ptx::uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads))),
        query_(ptx::uniform(ptx::shared_address(smem.q))),
        p_(ptx::uniform(ptx::shared_address(smem.p))) {}

  __device__ void run() {
    for (;;) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.piece_full[piece_.index]), piece_.phase);
      const Work& work = smem_.work[piece_.index];
      // PERF: as a uniform number it keeps all that is counted along with it out of the lanes' registers.
      const auto num_blocks = static_cast<std::int32_t>(ptx::uniform(static_cast<std::uint32_t>(work.num_blocks)));
      // Nothing in global memory is touched before the kernel in front of this one is done with it.
      ptx::grid_dependency_wait();
      if (num_blocks == Work::kNoMoreWork) return;
      begin_piece(work);
      clear_output();
      for (std::int32_t block = 0; block < num_blocks; block += kMathGroups) {
        if (block + group_ < num_blocks) score_block(block + group_ == 0);
        accumulate(block + 1 < num_blocks);
        // The owner of the last block knows the sums. PERF: while the last products are under way.
        if (block + kMathGroups >= num_blocks && group_ == (num_blocks - 1) % kMathGroups) publish_totals(work);
        finish_pv<Config>(output_);
        release_p(block + 1 < num_blocks ? 1 : 0);
      }
      if (num_blocks == 0 && group_ == 0) publish_totals(work);
      ptx::mbarrier_wait(ptx::shared_address(&smem_.totals_full), piece_.index % 2);
      if (smem_.nothing_valid != 0) clear_output();
      store_results(work);
      __syncwarp();
      if (ptx::lane_id_here() == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.piece_empty[piece_.index]));
      piece_.advance();
    }
  }

 private:
  // Both groups: the query's panels, and what a piece begins with.
  __device__ void begin_piece(const Work& work) {
    const int lane = ptx::lane_id_here();
    load_q<Config>(params_.problem, smem_, work, smem_.first_head, group_ * kWarpsPerWarpgroup + warp_, lane);
    if (group_ == 0) {
#pragma unroll
      for (int j = 0; j < Config::kSums * Config::kHeads / 8; ++j) {
        thread_sums(smem_, warp_, lane)[j * kWarpgroupThreads] = make_float2(0.0f, 0.0f);
      }
      if (is_first_thread()) smem_.piece = {false, false, -INFINITY};
    }
    // SYNC: the query was written by ordinary stores and is read by the tensor cores.
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
  }

  __device__ void clear_output() {
#pragma unroll
    for (auto& tile : output_) {
#pragma unroll
      for (float& value : tile) value = 0.0f;
    }
  }

  // From rows to P, sums and references of a block of this group.
  __device__ void score_block(bool is_first) {
    const auto ring = group_ == 0 ? stage_ : stage_.next();
    const std::uint32_t stage = ring.index;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_full[stage]), ring.phase);
    ptx::Accumulator<Config::kHeads> scores;
    TokenUnits units;
    score(scores, units, stage);
    // The softmax of the block before is done (group 0 accumulated it already), and everybody with this group's last P.
    if (group_ != 0) ptx::mbarrier_wait(ptx::shared_address(&smem_.p_full[0]), phase_of(0));
    ptx::mbarrier_wait(ptx::shared_address(&smem_.p_empty[group_]), phase_of(group_) ^ 1u);
    if (is_first_thread()) smem_.rescale[group_].needed = 0;

    const int lane = ptx::lane_id_here();
    const bool needs_care = isnan(units[0]) || isnan(units[1]);
    const float most = to_exponents<Config>(scores, smem_, units, lane);
    TokenFactors inverse = {inverse_unit(units[0]), inverse_unit(units[1])};
    // The first block of a piece raises references in any case, if it has a valid token.
    if (__builtin_expect(is_first || any_of_group(most > smem_.piece.raise_above || needs_care), 0)) {
      if (look_into(scores, units, stage, most, needs_care)) inverse[0] = inverse[1] = 0.0f;
    }
    store_probabilities<Config>(scores, smem_, smem_.p[group_], inverse, warp_, ptx::lane_id_here());
    // SYNC: P was written by ordinary stores and is read by the tensor cores.
    ptx::fence_proxy_async();
    // Every thread for what it wrote, so that compute-sanitizer can follow.
    ptx::mbarrier_arrive(ptx::shared_address(&smem_.p_full[group_]));
  }

  __device__ void score(ptx::Accumulator<Config::kHeads>& scores, TokenUnits& units, std::uint32_t stage) {
    const int lane = ptx::lane_id_here();
    TokenScales<Config> scales;
    score_qk<Config>(scores, query_, smem_.rows[stage], smem_.factors[group_], warp_, lane, [&](int pair) {
      // PERF: loaded a pair before they are needed, since a warp waits for its loads in order.
      const int token = warp_ * kTokensPerWarp + ptx::lane_id_here() % kTokensPerWarp;
      if (pair == 1) scales.load(smem_.rows[stage], token);
      if (pair == 2 && ptx::lane_id_here() < kTokensPerWarp) {
        scales.prepare(smem_.factors[group_], smem_.value_scales[stage], smem_.valid[stage][token], token);
      }
      if (pair == 3) __syncwarp();
      if (pair == kScorePairs<Config> - 1) {
        const float* unit = &smem_.factors[group_].unit[warp_ * kTokensPerWarp + ptx::lane_id_here() / 4];
        units[0] = unit[0];
        units[1] = unit[8];
      }
    });
  }

  // Seldom: for a block with tokens that need care, or with scores that left their references behind. True: its sums
  // are taken, as far ones.
  __device__ bool look_into(ptx::Accumulator<Config::kHeads>& scores, TokenUnits& units, std::uint32_t stage,
                            float most, bool needs_care) {
    const PieceState piece = smem_.piece;
    const bool care = any_of_group(needs_care);
    if constexpr (Config::kScaling != Scaling::none) {
      if (care) {
        score_qk_carefully<Config>(scores, query_, smem_.rows[stage], warp_, ptx::lane_id_here());
        load_units(units, smem_.rows[stage], ptx::lane_id_here());
        most = to_exponents<Config>(scores, smem_, units, ptx::lane_id_here());
      }
    }
    const bool far_sums = piece.far_sums || care;
    if (far_sums != piece.far_sums) {
      const int head = warp_ * kWarpThreads + ptx::lane_id_here();
      if (head < Config::kHeads) smem_.far_reference[head] = piece.seen_valid ? 0.0f : -INFINITY;
    }
    // The first valid tokens count as such even if all their scores are NaN.
    const bool has_valid = units[0] != -INFINITY || units[1] != -INFINITY;
    const bool raise = any_of_group(piece.seen_valid ? most > kLazyRaiseLog2 : has_valid);
    if (is_first_thread()) {
      const bool seen_valid = piece.seen_valid || raise;
      smem_.piece = {seen_valid, far_sums, seen_valid && !far_sums ? kLazyRaiseLog2 : -INFINITY};
    }
    if (raise) raise_references<Config>(scores, smem_, group_, !piece.seen_valid, far_sums, warp_);
    if (far_sums) add_far_sums<Config>(scores, smem_, group_, units, warp_);
    return far_sums;
  }

  // Issues PV of the next block or two, one of each group.
  __device__ void accumulate(bool has_second) {
    PvOperands<Config> operands;
    accumulate_block(operands, 0, [](int) {});
    if (has_second) {
      accumulate_block(operands, 1, [&](int step) {
        if (step == 1) release_p(0);
      });
    }
  }

  template <typename AfterWait>
  __device__ void accumulate_block(PvOperands<Config>& operands, int owner, AfterWait&& after_wait) {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.p_full[owner]), phase_of(owner));
    const Rescale<Config>& rescale = smem_.rescale[owner];
    if (__builtin_expect(rescale.needed != 0, 0)) {
      finish_pv<Config>(output_);
      rescale_output(rescale);
    }
    const std::uint32_t stage = stage_.index;
    accumulate_pv<Config>(
        output_, operands, p_ + owner * sizeof(Probabilities), smem_.rows[stage], smem_.value_scales[stage], group_,
        warp_, ptx::lane_id_here(),
        [&](int step) {
          if (ptx::lane_id_here() == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.kv_empty[stage][step]));
        },
        after_wait);
    stage_.advance();
    p_phases_ ^= 1u << owner;
  }

  __device__ void release_p(int owner) const {
    if (ptx::lane_id_here() == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.p_empty[owner]));
  }

  __device__ void rescale_output(const Rescale<Config>& rescale) {
    const int lane = ptx::lane_id_here();
#pragma unroll
    for (int j = 0; j < Config::kHeads / 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&rescale.by[8 * j + lane % 4 * 2]);
#pragma unroll
      for (auto& tile : output_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[4 * j + i] *= i % 2 == 0 ? by.x : by.y;
      }
    }
  }

  // Units of tokens that need care, instead of NaN.
  __device__ void load_units(TokenUnits& units, const RowBlock<Config>& block, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = warp_ * kTokensPerWarp + lane / 4 + 8 * r;
      if (!isnan(units[r])) continue;
      TokenScales<Config> scales;
      scales.load(block, token);
      units[r] = ptx::log2_approx(scales.unit());
    }
  }

  // At the end of a piece, one group: lse to memory, and for both groups what turns accumulators into results.
  __device__ void publish_totals(const Work& work) {
    const int lane = ptx::lane_id_here();
    const int row = warp_ * kWarpThreads + lane;
    const float sum = sum_of_head(0, row);
    const float divisor = Config::kIsBf16 ? sum_of_head(Config::kSums - 1, row) : sum;
    float lse = 0.0f;
    if (row < Config::kHeads) smem_.totals[row] = finish_head(work, row, sum, divisor, &lse);
    if (is_first_thread()) smem_.nothing_valid = smem_.piece.seen_valid ? 0 : 1;
    ptx::mbarrier_arrive(ptx::shared_address(&smem_.totals_full));
    if (row < params_.problem.h_q - smem_.first_head && row < Config::kHeads) store_lse(work, row, lse);
  }

  // Of head `row`, over all threads of the group, for the first threads; all take part.
  __device__ float sum_of_head(int kind, int row) {
    const int lane = ptx::lane_id_here();
    OfHeads<Config> sums;
#pragma unroll
    for (int h = 0; h < Config::kHeads / 4; ++h) {
      const float2& own = thread_sums(smem_, warp_, lane, kind)[h / 2 * kWarpgroupThreads];
      sums[h] = h % 2 == 0 ? own.x : own.y;
    }
    reduce_over_rows(sums, [](float a, float b) { return a + b; });
    // The last kind's are read.
    if (kind > 0) ptx::named_barrier_sync(kGroupBarrier + group_, kWarpgroupThreads);
    store_of_heads<Config>(sums, smem_, warp_, lane);
    ptx::named_barrier_sync(kGroupBarrier + group_, kWarpgroupThreads);
    if (row >= Config::kHeads) return 0.0f;
    return (smem_.of_warp[0][row] + smem_.of_warp[1][row]) + (smem_.of_warp[2][row] + smem_.of_warp[3][row]);
  }

  // The lse of a head, and the multiplier for its accumulators.
  __device__ float finish_head(const Work& work, int row, float sum, float divisor, float* lse) {
    const DecodeProblem& problem = params_.problem;
    const PieceState piece = smem_.piece;
    const float far = piece.far_sums ? smem_.far_reference[row] : 0.0f;
    *lse = piece.seen_valid ? (smem_.head[row].reference + far + log2f(sum)) * std::numbers::ln2_v<float> : -INFINITY;
    if (!piece.seen_valid) return 0.0f;
    float multiplier = exp2f(-far) / divisor;
    if constexpr (Config::kTraits.scale_type == ScaleType::cache) multiplier *= problem.kv.scale;
    const int head = smem_.first_head + row;
    const bool has_sink =
        work.piece.slot == tile::Piece::kWholeRow && problem.attn_sink != nullptr && head < problem.h_q;
    if (!has_sink) return multiplier;
    return multiplier * tile::sink_multiplier(*lse, problem.attn_sink[head * problem.attn_sink_stride]);
  }

  __device__ void store_lse(const Work& work, int row, float lse) const {
    const DecodeProblem& problem = params_.problem;
    const int head = smem_.first_head + row;
    if (work.piece.slot != tile::Piece::kWholeRow) {
      params_.part_lse[std::int64_t{work.piece.slot} * problem.h_q + head] = lse;
    } else {
      problem.lse[work.request * problem.lse_stride_b + work.query_token * problem.lse_stride_s +
                  head * problem.lse_stride_h] = lse;
    }
  }

  __device__ void store_results(const Work& work) {
    const DecodeProblem& problem = params_.problem;
    const int first_head = smem_.first_head;
    const int num_heads = problem.h_q - first_head;
    const int first_column = group_ * kColumnsPerGroup + warp_ * kColumnsPerWarp;
    if (work.piece.slot == tile::Piece::kWholeRow) {
      bf16_t* out = problem.out + work.request * problem.out_stride_b + work.query_token * problem.out_stride_s +
                    first_head * problem.out_stride_h;
      store_out<Config>(output_, smem_.totals, out, problem.out_stride_h, num_heads, first_column);
    } else {
      float* part = params_.part_out + (std::int64_t{work.piece.slot} * problem.h_q + first_head) * kValueDim;
      store_part<Config>(output_, smem_.totals, part, num_heads, first_column);
    }
  }

  __device__ bool is_first_thread() const {
    return warp_ == 0 && ptx::lane_id_here() == 0;
  }
  __device__ bool any_of_group(bool vote) const {
    return ptx::named_barrier_any(kGroupBarrier + group_, kWarpgroupThreads, vote);
  }
  // Parity of the next P of `owner` that this group accumulates.
  __device__ std::uint32_t phase_of(int owner) const {
    return p_phases_ >> owner & 1u;
  }

  const SplitParams& params_;
  SmemPlan<Config>& smem_;
  int group_, warp_;
  std::uint32_t query_, p_;      // shared addresses, the same in all lanes as far as the compiler knows
  Ring<Config::kStages> stage_;  // of the next block to accumulate
  Ring<kPieceSlots> piece_;
  std::uint32_t p_phases_ = 0;
  OutputTiles<Config::kHeads> output_;
};

}  // namespace chiasma::sm90_sparse_fp8_direct
