// The scorer: one warpgroup that turns every block of rows into probabilities.
#pragma once

#include "cuda/sm90_sparse_fp8_direct/load_q.cuh"
#include "cuda/sm90_sparse_fp8_direct/prepare_factors.cuh"
#include "cuda/sm90_sparse_fp8_direct/softmax_step.cuh"
#include "cuda/tile/sink.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

inline constexpr float kLn2 = 0.6931471805599453f;

template <typename Config>
class Scorer {
 public:
  __device__ Scorer(const SplitParams& params, SmemPlan<Config>& smem)
      : params_(params),
        smem_(smem),
        warp_(threadIdx.x % kWarpgroupThreads / kWarpThreads),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void run() {
    while (next_piece()) {
      const std::int32_t num_blocks = smem_.work.num_blocks;
      seen_valid_ = false;
      clear_sums();
      if (num_blocks > 0) {
        load_first_halves();
        load_query();
        for (std::int32_t block = 0; block < num_blocks; ++block) score_block(block == 0, block + 1 == num_blocks);
        publish_note();
      }
      send_totals(smem_.work);
    }
    Note<Config>& note = acquire_note();
    if (is_first_thread()) note.kind = NoteKind::no_more_work;
    publish_note();
  }

 private:
  __device__ bool next_piece() {
    // Everybody is done with the last one.
    ptx::named_barrier_sync(kScoreBarrier, kWarpgroupThreads);
    if (is_first_thread()) {
      smem_.has_work = next_work(params_, smem_.group, &smem_.unit, &smem_.work);
      if (smem_.has_work && smem_.work.num_blocks > 0) smem_.query_phase ^= 1u;
    }
    ptx::named_barrier_sync(kScoreBarrier, kWarpgroupThreads);
    return smem_.has_work;
  }

  __device__ void clear_sums() {
#pragma unroll
    for (int j = 0; j < Config::kHeads / 8; ++j) {
      thread_sums(smem_, warp_, lane_)[j * kWarpgroupThreads] = make_float2(0.0f, 0.0f);
    }
  }

  __device__ void load_query() {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.q_full), smem_.query_phase);
    load_q(params_.problem, smem_, smem_.first_head, ptx::thread_id_here() / kWarpThreads, ptx::lane_id_here());
    // SYNC: the query was written by ordinary stores and is read by the tensor cores.
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kScoreBarrier, kWarpgroupThreads);
  }

  // Waits for the next block's rows and loads their first halves.
  __device__ void load_first_halves() {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_full[stage_.index]), stage_.phase);
    const RowReader reader(smem_.rows[stage_.index], warp_, lane_);
#pragma unroll
    for (int half = 0; half < kHalvesAhead; ++half) raw_[half] = reader.load_codes(half);
  }

  // PERF: the note of a block is not published before most of the next block's products are under way, so that PV has
  // the tensor cores while this warpgroup is busy with its softmax, and does not slow down its QK.
  __device__ void score_block(bool is_first, bool is_last) {
    const std::uint32_t stage = stage_.index;
    ptx::Accumulator<Config::kHeads> scores;
    float4 scales;
    TokenUnits units;
    score_qk<Config>(scores, smem_, stage, raw_, warp_, lane_, [&](int step) {
      // PERF: loaded a step before they are needed, since a warp waits for its loads in order.
      if (step == 1) scales = smem_.rows[stage].scales(own_token());
      if (step == 2 && lane_ < kTokensPerWarp) {
        const int token = own_token();
        prepare_factors(smem_.factors[stage], scales, smem_.valid[stage][token], token);
      }
      if (step == 3) __syncwarp();
      if (step == kNoteStep) begin_note(stage);
      if (step == kScoreSteps - 1) {
        const float* unit = &smem_.factors[stage].unit[warp_ * kTokensPerWarp + lane_ / 4];
        units[0] = unit[0];
        units[1] = unit[8];
      }
      if (step == kPublishStep && !is_first) publish_note();
    });
    stage_.advance();
    const bool needs_care = isnan(units[0]) || isnan(units[1]);
    float most = to_exponents<Config>(scores, smem_, units, lane_);
    if (__builtin_expect(any_scorer_thread(leaves_reference(most) || needs_care), 0)) {
      bool raise = true;
      if (any_scorer_thread(needs_care)) {
        score_qk_carefully<Config>(scores, smem_, smem_.rows[stage], warp_, ptx::lane_id_here());
        load_units(units, smem_.rows[stage], ptx::lane_id_here());
        most = to_exponents<Config>(scores, smem_, units, ptx::lane_id_here());
        raise = any_scorer_thread(leaves_reference(most));
      }
      if (raise) {
        raise_references<Config>(scores, smem_, smem_.note[note_.index], !seen_valid_, warp_);
        seen_valid_ = true;
      }
    }
    // The query is not needed any more.
    if (is_last && lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.q_empty));
    store_probabilities<Config>(scores, smem_, smem_.p[note_.index], units, warp_, ptx::lane_id_here());
    if (!is_last) load_first_halves();
  }

  static __device__ bool is_first_thread() {
    return ptx::thread_id_here() == 0;
  }

  // The token whose factors this lane prepares, if it is among the first lanes.
  __device__ int own_token() const {
    return warp_ * kTokensPerWarp + ptx::lane_id_here() % kTokensPerWarp;
  }

  // Units of tokens whose scales need care, instead of NaN.
  __device__ void load_units(TokenUnits& units, const RowBlock& block, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = warp_ * kTokensPerWarp + lane / 4 + 8 * r;
      if (isnan(units[r])) units[r] = static_cast<float>(unit_exponent(block.scales(token)));
    }
  }

  static __device__ bool any_scorer_thread(bool vote) {
    return ptx::named_barrier_any(kScoreBarrier, kWarpgroupThreads, vote);
  }
  // Whether references must move for an exponent as large as this.
  __device__ bool leaves_reference(float most) const {
    return most > (seen_valid_ ? kLazyRaiseLog2 : -INFINITY);
  }

  // The note of a block, once that of the block before is published.
  __device__ void begin_note(std::uint32_t stage) {
    Note<Config>& note = acquire_note();
    if (is_first_thread()) {
      note.kind = NoteKind::block;
      note.stage = stage;
    }
  }
  __device__ Note<Config>& acquire_note() {
    ptx::mbarrier_wait(ptx::shared_address(&smem_.note_empty[note_.index]), note_.phase ^ 1u);
    return smem_.note[note_.index];
  }
  __device__ void publish_note() {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.note_full[note_.index]));
    note_.advance();
  }

  // At the end of a piece: lse to memory; to the accumulators what turns their numbers into results, and where those
  // go.
  __device__ void send_totals(const Work& work) {
    const int lane = ptx::lane_id_here();
#pragma unroll
    for (int h = 0; h < Config::kHeads / 4; ++h) {
      const float2& own = thread_sums(smem_, warp_, lane)[h / 2 * kWarpgroupThreads];
      const float sum = sum_over_rows(h % 2 == 0 ? own.x : own.y);
      if (lane < 4) smem_.of_warp[warp_][h / 2 * 8 + lane * 2 + h % 2] = sum;
    }
    Note<Config>& note = acquire_note();
    ptx::named_barrier_sync(kScoreBarrier, kWarpgroupThreads);
    const int row = warp_ * kWarpThreads + lane;
    if (row < Config::kHeads) note.multiplier[row] = finish_head(work, row);
    if (row == 0) {
      const DecodeProblem& problem = params_.problem;
      const bool whole = work.piece.slot == tile::Piece::kWholeRow;
      note.kind = NoteKind::end_of_piece;
      note.out = whole ? problem.out + work.request * problem.out_stride_b + work.query_token * problem.out_stride_s +
                             smem_.first_head * problem.out_stride_h
                       : nullptr;
      note.part_out = params_.part_out + (std::int64_t{work.piece.slot} * problem.h_q + smem_.first_head) * kValueDim;
    }
    publish_note();
  }

  // Stores the lse of a head and returns the multiplier for its accumulators.
  __device__ float finish_head(const Work& work, int row) {
    const DecodeProblem& problem = params_.problem;
    const int head = smem_.first_head + row;
    if (head >= problem.h_q) return 0.0f;
    const float sum = (smem_.of_warp[0][row] + smem_.of_warp[1][row]) +  //
                      (smem_.of_warp[2][row] + smem_.of_warp[3][row]);
    const float lse = seen_valid_ ? (smem_.head[row].reference + log2f(sum)) * kLn2 : -INFINITY;
    const float multiplier = seen_valid_ ? 1.0f / sum : 0.0f;
    if (work.piece.slot != tile::Piece::kWholeRow) {
      params_.part_lse[std::int64_t{work.piece.slot} * problem.h_q + head] = lse;
      return multiplier;
    }
    problem.lse[work.request * problem.lse_stride_b + work.query_token * problem.lse_stride_s +
                head * problem.lse_stride_h] = lse;
    if (problem.attn_sink == nullptr) return multiplier;
    return multiplier * tile::sink_multiplier(lse, problem.attn_sink[head * problem.attn_sink_stride]);
  }

  const SplitParams& params_;
  SmemPlan<Config>& smem_;
  int warp_, lane_;
  Ring<Config::kStages> stage_;
  Ring<kNotes> note_;
  bool seen_valid_ = false;
  RawHalves raw_;  // of the next block
};

}  // namespace chiasma::sm90_sparse_fp8_direct
