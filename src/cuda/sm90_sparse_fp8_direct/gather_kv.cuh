// Stage gather_kv: stored rows from the cache into shared memory, as they are, and the queries that they meet. Every
// warp of the gatherer looks after 16 of a block's 64 rows.
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
        unit_(params.schedule.first_unit(smem.group)),
        warp_(threadIdx.x % kWarpgroupThreads / kWarpThreads),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void run() {
    for (;;) {
      const std::byte* row = resolve(index_);
      const bool has_block = has_block_;
      const bool starts_piece = starts_piece_;
      // The indices of the next block are on their way before those of this one are needed.
      advance();
      if (has_block) {
        ptx::mbarrier_wait(ptx::shared_address(&smem_.kv_empty[stage_.index][warp_]), stage_.phase ^ 1u);
        gather_rows(row);
        stage_.advance();
        // Behind the rows, since the query's place is free only when the last piece was scored.
        if (starts_piece) gather_query();
      } else if (!has_block_) {
        return;
      }
    }
  }

 private:
  // Leads to the next block, at first to the first, and asks for its indices.
  __device__ void advance() {
    entry_ += kBlockTokens;
    starts_piece_ = entry_ >= end_entry_;
    has_block_ = !starts_piece_ || next_piece();
    const std::int32_t own = entry_ + warp_ * kTokensPerWarp + lane_ % kTokensPerWarp;
    index_ = has_block_ && own < valid_entries_ ? __ldg(indices_ + own) : -1;
    if (has_block_ && starts_piece_) prefetch_query();
  }

  // To the next piece that has blocks; false if there is none.
  __device__ bool next_piece() {
    Work work;
    do {
      if (!next_work(params_, smem_.group, &unit_, &work)) return false;
    } while (work.num_blocks == 0);
    const DecodeProblem& problem = params_.problem;
    const Selection& selection = problem.selection;
    indices_ = selection.indices + work.request * selection.stride_b + work.query_token * selection.stride_s;
    valid_entries_ = work.valid_entries;
    entry_ = work.piece.first_block * kBlockTokens;
    end_entry_ = entry_ + work.num_blocks * kBlockTokens;
    if (lane_ == 0) {
      smem_.query[warp_][pieces_ % 2] = problem.q + work.request * problem.q_stride_b +
                                        work.query_token * problem.q_stride_s + smem_.first_head * problem.q_stride_h;
    }
    __syncwarp();
    ++pieces_;
    return true;
  }

  __device__ const std::byte* resolve(std::int32_t slot) const {
    const KvPool& kv = params_.problem.kv;
    if (slot < 0 || slot >= kv.num_slots()) return reinterpret_cast<const std::byte*>(&masked_row);
    const auto page_size = static_cast<std::uint32_t>(kv.page_size);
    const std::uint32_t page = static_cast<std::uint32_t>(slot) / page_size;
    const std::uint32_t offset = static_cast<std::uint32_t>(slot) - page * page_size;
    return kv.data + page * kv.page_stride_bytes + std::int64_t{offset} * v32::kRowBytes;
  }

  // row: of the lane's token, for the first lanes.
  __device__ void gather_rows(const std::byte* row) {
    const int token = warp_ * kTokensPerWarp + lane_;
    const std::uint32_t kv_full = ptx::shared_address(&smem_.kv_full[stage_.index]);
    if (lane_ < kTokensPerWarp) {
      smem_.valid[stage_.index][token] = row != reinterpret_cast<const std::byte*>(&masked_row);
    }
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive_expect_tx(kv_full, kTokensPerWarp * v32::kRowBytes);
    __syncwarp();
    if (lane_ < kTokensPerWarp) {
      ptx::copy_bulk_from_global(ptx::shared_address(smem_.rows[stage_.index].row[token]), row, v32::kRowBytes,
                                 kv_full);
    }
  }

  // The query of a piece, every chunk to its place in the panels. A warp takes every fourth head.
  __device__ void gather_query() {
    // The last piece that advance() led to, or the one before if it led to another already.
    const std::uint32_t piece = (pieces_ - (starts_piece_ && has_block_ ? 2 : 1)) % 2;
    ptx::mbarrier_wait(ptx::shared_address(&smem_.q_empty), piece ^ 1u);
    const bf16_t* query = smem_.query[warp_][piece];
    const int lane = ptx::lane_id_here();
    const int num_heads = min(params_.problem.h_q - smem_.first_head, Config::kHeads);
    const std::uint32_t panels = ptx::shared_address(smem_.q);
    constexpr int kPanelBytes = SmemPlan<Config>::kQueryPanelBytes;
#pragma unroll 1
    for (int head = warp_; head < num_heads; head += kWarpsPerWarpgroup) {
      const bf16_t* chunk = query + head * params_.problem.q_stride_h + lane * tile::kChunkColumns;
      const std::uint32_t target = panels + lane / 8 * kPanelBytes + tile::chunk_offset(head, lane % 8);
      ptx::copy_async_16(target, chunk);
      ptx::copy_async_16(target + 4 * kPanelBytes, chunk + 4 * tile::kPanelColumns);
      if (lane < 8) ptx::copy_async_16(target + kRopePanel * kPanelBytes, chunk + kRopePanel * tile::kPanelColumns);
    }
    ptx::copy_async_arrive(ptx::shared_address(&smem_.q_full));
  }

  // PERF: a piece's query is copied only when the last one's is no longer needed, and then at once.
  __device__ void prefetch_query() const {
    const bf16_t* query = smem_.query[warp_][(pieces_ - 1) % 2];
    const int lane = ptx::lane_id_here();
    constexpr int kLines = v32::kKeyDim * 2 / 128;
    const int num_heads = min(params_.problem.h_q - smem_.first_head, Config::kHeads);
    for (int line = warp_ * kWarpThreads + lane; line < num_heads * kLines; line += kWarpgroupThreads) {
      const int head = line / kLines;
      ptx::prefetch_l2(query + head * params_.problem.q_stride_h + (line - head * kLines) * 64);
    }
  }

  const SplitParams& params_;
  SmemPlan<Config>& smem_;
  std::int32_t unit_;
  int warp_, lane_;
  Ring<Config::kStages> stage_;
  const std::int32_t* indices_ = nullptr;
  std::int32_t valid_entries_ = 0, entry_ = 0, end_entry_ = 0;
  std::int32_t index_ = -1;
  std::uint32_t pieces_ = 0;  // that advance() led to
  bool has_block_ = false, starts_piece_ = false;
};

}  // namespace chiasma::sm90_sparse_fp8_direct
