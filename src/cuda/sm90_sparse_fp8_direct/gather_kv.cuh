// Stage gather_kv: stored rows from the cache into shared memory, as they are. The
// accumulation hands the places of a block's rows back 16 by 16, and every warp of the gatherer fills four of each 16,
// so that all of them are at work at once.
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_direct/load_q.cuh"
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
        warp_(static_cast<int>(ptx::uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads))) {}

  __device__ void run() {
    if (lane() == 0) {
      const std::int64_t num_slots = min(params_.problem.kv.num_slots(), std::int64_t{INT32_MAX} + 1);
      state() = {nullptr, 0,
                 0,       0,
                 0,       params_.schedule.first_unit(group_of_block<Config>(params_)),
                 0,       static_cast<std::uint32_t>(num_slots)};
    }
    __syncwarp();
    advance();
    while (step_ != Step::end) {
      const bool has_rows = step_ != Step::empty_piece;
      const bool starts_piece = step_ == Step::first_block;
      const std::byte* row = resolve(index_);
      // The indices of the next block are on their way before those of this one are needed.
      advance();
      if (!has_rows) continue;
      gather_rows(row);
      stage_.advance();
      // Behind the first rows, since the query's place is free only when the last piece was scored.
      if (starts_piece) hand_over_query();
    }
  }

 private:
  enum class Step { first_block, block, empty_piece, end };

  // Leads to the next step, at first to the first, and asks for its indices.
  __device__ void advance() {
    entry_ += kBlockTokens;
    step_ = entry_ < state().end_entry ? Step::block : next_piece();
    const std::int32_t own = entry_ + token();
    index_ = own < state().valid_entries ? __ldg(state().indices + own) : -1;
  }

  // Pieces are described as soon as they are known, at most one ahead of the rows asked for.
  __device__ Step next_piece() {
    std::int32_t unit = state().unit;
    Work work = next_work(params_, group_of_block<Config>(params_), &unit);
    work.query = state().queries;
    // Everybody has read the old state.
    __syncwarp();
    if (threadIdx.x % kWarpgroupThreads == 0) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.piece_empty[piece_.index]), piece_.phase ^ 1u);
      smem_.work[piece_.index] = work;
      ptx::mbarrier_arrive(ptx::shared_address(&smem_.piece_full[piece_.index]));
    }
    piece_.advance();
    entry_ = work.piece.first_block * kBlockTokens;
    const bool has_blocks = work.num_blocks > 0;
    if (lane() == 0) {
      const Selection& selection = params_.problem.selection;
      GatherState& state = this->state();
      state.indices = selection.indices + work.request * selection.stride_b + work.query_token * selection.stride_s;
      state.valid_entries = has_blocks ? work.valid_entries : 0;
      state.end_entry = has_blocks ? entry_ + work.num_blocks * kBlockTokens : 0;
      state.previous_row = state.row;
      state.row = work.piece.row;
      state.unit = unit;
      state.queries = work.query + (has_blocks ? 1 : 0);
    }
    __syncwarp();
    if (!has_blocks) return work.num_blocks == 0 ? Step::empty_piece : Step::end;
    prefetch_query();
    return Step::first_block;
  }

  // PERF: worked out where it is needed; registers are few.
  static __device__ int lane() { return ptx::lane_id_here(); }

  __device__ GatherState& state() const { return smem_.gather[warp_]; }

  // Of the piece whose first rows were just asked for; advance() may have led to the next one already.
  __device__ void hand_over_query() {
    const std::uint32_t query = state().queries - (step_ == Step::first_block ? 2 : 1);
    // The math warps load the first one.
    if (query == 0) return;
    const std::int32_t row = step_ == Step::block ? state().row : state().previous_row;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.q_empty), query % 2 ^ 1u);
    const DecodeProblem& problem = params_.problem;
    const int first_head = first_head_of_block<Config>(params_);
    const int lane = ptx::lane_id_here();
    load_q<1>(problem, smem_, query_of(problem, row, first_head), problem.h_q - first_head, warp_, kWarpsPerWarpgroup,
              lane);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&smem_.q_full));
  }

  __device__ const std::byte* resolve(std::int32_t slot) const {
    const KvPool& kv = params_.problem.kv;
    // As an unsigned number a negative one is beyond all slots.
    if (static_cast<std::uint32_t>(slot) >= state().num_slots) return reinterpret_cast<const std::byte*>(&masked_row);
    const auto page_size = static_cast<std::uint32_t>(kv.page_size);
    const std::uint32_t page = static_cast<std::uint32_t>(slot) / page_size;
    const std::uint32_t offset = static_cast<std::uint32_t>(slot) - page * page_size;
    return kv.data + page * kv.page_stride_bytes + std::int64_t{offset} * v32::kRowBytes;
  }

  // The lane's token of a block, for the first 16 lanes.
  static constexpr int kRowsAtOnce = kTokensPerWarp / kWarpsPerWarpgroup;
  __device__ int token() const {
    return lane() / kRowsAtOnce % kWarpsPerWarpgroup * kTokensPerWarp + warp_ * kRowsAtOnce + lane() % kRowsAtOnce;
  }

  // row: of the lane's token.
  __device__ void gather_rows(const std::byte* row) {
    const std::uint32_t kv_full = ptx::shared_address(&smem_.kv_full[stage_.index]);
#pragma unroll
    for (int part = 0; part < kWarpsPerWarpgroup; ++part) {
      ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_empty[stage_.index][part]), stage_.phase ^ 1u);
      if (part == 0) {
        // Nobody asks for the last block's validity any more once its accumulation has begun.
        if (lane() < kTokensPerWarp) {
          smem_.valid[stage_.index][token()] = row != reinterpret_cast<const std::byte*>(&masked_row);
        }
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive_expect_tx(kv_full, kTokensPerWarp * v32::kRowBytes);
        __syncwarp();
      }
      copy_rows(row, part, kv_full);
    }
  }

  // PERF: one lane copies for all: with addresses that are the same in all lanes, copies follow each other closely,
  // while a copy a lane would be a loop over lanes.
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
  __device__ void prefetch_query() const {
    const DecodeProblem& problem = params_.problem;
    const int first_head = first_head_of_block<Config>(params_);
    const bf16_t* query = query_of(problem, state().row, first_head);
    const int lane = ptx::lane_id_here();
    constexpr int kLines = v32::kKeyDim * 2 / 128;
    const int num_heads = min(problem.h_q - first_head, Config::kHeads);
    for (int line = warp_ * kWarpThreads + lane; line < num_heads * kLines; line += kWarpgroupThreads) {
      const int head = line / kLines;
      ptx::prefetch_l2(query + head * problem.q_stride_h + (line - head * kLines) * 64);
    }
  }

  const SplitParams& params_;
  SmemPlan<Config>& smem_;
  std::int32_t unit_;
  int warp_;
  Ring<Config::kStages> stage_;
  Ring<kPieceSlots> piece_;
  std::int32_t entry_ = 0;
  std::int32_t index_ = -1;
  Step step_ = Step::end;
};

}  // namespace chiasma::sm90_sparse_fp8_direct
