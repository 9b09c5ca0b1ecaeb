// An accumulator: one of two warpgroups, each of which sums half of the output columns over all blocks, as the scorer's
// notes tell it.
#pragma once

#include "cuda/sm90_sparse_fp8_direct/store_out.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

template <typename Config>
class Accumulator {
 public:
  __device__ Accumulator(const DecodeProblem& problem, SmemPlan<Config>& smem, int first_head, int number)
      : problem_(problem),
        smem_(smem),
        first_head_(first_head),
        number_(number),
        warp_(threadIdx.x % kWarpgroupThreads / kWarpThreads),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void run() {
    clear();
    for (;;) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.note_full[note_.index]), note_.phase);
      const Note<Config>& note = smem_.note[note_.index];
      const NoteKind kind = note.kind;
      if (kind == NoteKind::no_more_work) return;
      if (kind == NoteKind::end_of_piece) {
        store_out<Config>(output_, problem_, note, first_head_,
                          number_ * kColumnsPerAccumulator + warp_ * kColumnsPerWarp);
        clear();
        __syncwarp();
      } else {
        if (kind == NoteKind::rescale_and_block) rescale(note);
        const std::uint32_t stage = note.stage;
        // SYNC: P was written by ordinary stores and is read by the tensor cores. Here, since the scorer has less time.
        ptx::fence_proxy_async();
        accumulate_pv<Config>(output_, smem_.p[note_.index], smem_.rows[stage], smem_.factors[stage].value_scale,
                              number_, warp_, lane_, [&](int step) {
                                if (lane_ == 0) {
                                  ptx::mbarrier_arrive(ptx::shared_address(&smem_.kv_empty[stage][step]));
                                }
                              });
      }
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.note_empty[note_.index]));
      note_.advance();
    }
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (auto& tile : output_) {
#pragma unroll
      for (float& value : tile) value = 0.0f;
    }
  }

  __device__ void rescale(const Note<Config>& note) {
    const int lane = ptx::lane_id_here();
#pragma unroll
    for (int j = 0; j < Config::kHeads / 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&note.multiplier[8 * j + lane % 4 * 2]);
#pragma unroll
      for (auto& tile : output_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[4 * j + i] *= i % 2 == 0 ? by.x : by.y;
      }
    }
  }

  const DecodeProblem& problem_;
  SmemPlan<Config>& smem_;
  int first_head_, number_, warp_, lane_;
  Ring<kNotes> note_;
  OutputTiles<Config::kHeads> output_;
};

}  // namespace chiasma::sm90_sparse_fp8_direct
