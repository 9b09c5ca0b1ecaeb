// Stage gather_kv: stored rows from the cache into shared memory, as they are. Accumulation hands the places of a
// block's rows back 16 by 16, and every warp of the gatherer fills four of each 16, so that all of them are at work at
// once.
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"
#include "cuda/sm90_sparse_fp8_direct/work_list.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// What masked rows are copied from, so that no copy needs a condition and no NaN of another row stays in its place:
// codes and RoPE values of 0, scales of 1.
struct alignas(16) MaskedRow {
  std::uint8_t codes[v32::kNopeDim];
  float scales[v32::kNumTiles];
  std::uint8_t rope[kRopeDim * 2];
};
static_assert(sizeof(MaskedRow) == v32::kRowBytes);
__device__ const MaskedRow masked_row = {{}, {1.0f, 1.0f, 1.0f, 1.0f}, {}};

template <typename Config>
class Gatherer {
 public:
  __device__ Gatherer(const SplitParams& params, SmemPlan<Config>& smem)
      : params_(params),
        smem_(smem),
        unit_(params.schedule.first_unit(group_of_block<Config>(params))),
        warp_(static_cast<int>(ptx::uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads))),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void run() {
    advance();
    while (step_ != Step::end) {
      const bool has_rows = step_ == Step::block;
      const std::byte* row = resolve(index_);
      // The indices of the next block are on their way before those of this one are needed.
      advance();
      if (!has_rows) continue;
      gather_rows(row);
      stage_.advance();
    }
  }

 private:
  enum class Step { block, empty_piece, end };

  // Leads to the next step, at first to the first, and asks for its indices.
  __device__ void advance() {
    entry_ += kBlockTokens;
    const bool begins = entry_ >= end_entry_;
    step_ = begins ? next_piece() : Step::block;
    const std::int32_t own = entry_ + token();
    index_ = own < valid_entries_ ? __ldg(indices_ + own) : -1;
    // PERF: not before, so that the first indices do not queue behind the loads of the query.
    if (begins) announce_piece();
  }

  __device__ Step next_piece() {
    const Work work = next_work(params_, group_of_block<Config>(params_), &unit_);
    if (describes()) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.piece_empty[piece_.index]), piece_.phase ^ 1u);
      smem_.work[piece_.index] = work;
    }
    valid_entries_ = 0;
    if (work.num_blocks <= 0) return work.num_blocks == 0 ? Step::empty_piece : Step::end;
    // Whose query is loaded at once.
    const bool is_first = indices_ == nullptr;
    const Selection& selection = params_.problem.selection;
    indices_ = selection.indices + work.request * selection.stride_b + work.query_token * selection.stride_s;
    valid_entries_ = work.valid_entries;
    entry_ = work.piece.first_block * kBlockTokens;
    end_entry_ = entry_ + work.num_blocks * kBlockTokens;
    if (!is_first) prefetch_query(work);
    return Step::block;
  }

  // Pieces are described as soon as they are known, at most one ahead of the rows asked for.
  __device__ void announce_piece() {
    if (describes()) ptx::mbarrier_arrive(ptx::shared_address(&smem_.piece_full[piece_.index]));
    piece_.advance();
  }
  __device__ static bool describes() { return threadIdx.x % kWarpgroupThreads == 0; }

  __device__ const std::byte* resolve(std::int32_t slot) const {
    const KvPool& kv = params_.problem.kv;
    if (slot < 0 || slot >= kv.num_slots()) return reinterpret_cast<const std::byte*>(&masked_row);
    const auto page_size = static_cast<std::uint32_t>(kv.page_size);
    const std::uint32_t page = static_cast<std::uint32_t>(slot) / page_size;
    const std::uint32_t offset = static_cast<std::uint32_t>(slot) - page * page_size;
    return kv.data + page * kv.page_stride_bytes + std::int64_t{offset} * v32::kRowBytes;
  }

  // The lane's token of a block, for the first 16 lanes.
  static constexpr int kRowsAtOnce = kTokensPerWarp / kWarpsPerWarpgroup;
  __device__ int token() const {
    return lane_ / kRowsAtOnce % kWarpsPerWarpgroup * kTokensPerWarp + warp_ * kRowsAtOnce + lane_ % kRowsAtOnce;
  }

  // row: of the lane's token.
  __device__ void gather_rows(const std::byte* row) {
    const std::uint32_t kv_full = ptx::shared_address(&smem_.kv_full[stage_.index]);
#pragma unroll
    for (int part = 0; part < kWarpsPerWarpgroup; ++part) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_empty[stage_.index][part]), stage_.phase ^ 1u);
      if (part == 0) {
        // Nobody asks for the last block's validity any more once its accumulation has begun.
        if (lane_ < kTokensPerWarp) {
          smem_.valid[stage_.index][token()] = row != reinterpret_cast<const std::byte*>(&masked_row);
          ptx::mbarrier_arrive_expect_tx(kv_full, v32::kRowBytes);
        }
        __syncwarp();
      }
      copy_rows(row, part, kv_full);
    }
  }

  // One lane copies for all, with addresses that are the same in all lanes. A copy a lane would become a loop over
  // lanes, which is more code, if no slower: a copy keeps its warp busy for 115 clk in any case (H200, 2026-11-30).
  __device__ void copy_rows(const std::byte* row, int part, std::uint32_t kv_full) {
    const int first_token = part * kTokensPerWarp + warp_ * kRowsAtOnce;
    const std::uint32_t target = ptx::shared_address(smem_.rows[stage_.index].row[first_token]);
    const std::byte* source[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      source[i] = reinterpret_cast<const std::byte*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), part * kRowsAtOnce + i));
    }
    if (!ptx::elect_lane()) return;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      ptx::copy_bulk_from_global(target + i * v32::kRowBytes, source[i], v32::kRowBytes, kv_full);
    }
  }

  // PERF: into L2, so that the math warpgroups need not wait for DRAM when the piece's turn comes.
  __device__ void prefetch_query(const Work& work) const {
    const DecodeProblem& problem = params_.problem;
    const int first_head = smem_.first_head;
    const int num_heads = min(problem.h_q - first_head, Config::kHeads);
    const int thread = warp_ * kWarpThreads + ptx::lane_id_here();
    constexpr int kLineColumns = 64;  // of 128 bytes
    constexpr int kLines = v32::kNopeDim / kLineColumns;
    static_assert(kRopeDim == kLineColumns && kWarpgroupThreads >= Config::kHeads);
    // PERF: one pointer at a time, since the gatherer's registers are few.
    if (thread < num_heads) ptx::prefetch_l2(query_rope_of(problem, work, first_head + thread));
    const bf16_t* query = query_of(problem, work, first_head);
    for (int line = thread; line < num_heads * kLines; line += kWarpgroupThreads) {
      ptx::prefetch_l2(query + line / kLines * problem.q_stride_h + line % kLines * kLineColumns);
    }
  }

  const SplitParams& params_;
  SmemPlan<Config>& smem_;
  std::int32_t unit_;
  int warp_, lane_;
  Ring<Config::kStages> stage_;
  Ring<kPieceSlots> piece_;
  const std::int32_t* indices_ = nullptr;
  std::int32_t valid_entries_ = 0, entry_ = 0, end_entry_ = 0;
  std::int32_t index_ = -1;
  Step step_ = Step::end;
};

}  // namespace chiasma::sm90_sparse_fp8_direct
