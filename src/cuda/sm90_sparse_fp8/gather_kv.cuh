// Stage gather_kv: stored rows from the cache into producer registers. They are brought into L2 a step ahead, since
// bytes in flight are what the gather's speed depends on.
#pragma once

#include "cuda/sm90_sparse_fp8/smem_plan.h"
#include "cuda/sm90_sparse_fp8/work_list.cuh"

namespace chiasma::sm90_sparse_fp8 {

// Four rows of a warp. Eight lanes see to a row's scales and RoPE values, so that none has to ask another, but all of
// them to its codes: 64 scattered bytes would touch three sectors of 32, 256 in a row only nine.
inline constexpr int kLanesPerRow = kWarpThreads / kRowsPerWarp;
static_assert(kLanesPerRow * tile::kChunkColumns == tile::kPanelColumns);

struct GatheredRows {
  uint2 codes[kRowsPerWarp][kHalves];  // of each row, those of panel l / 8 of each half, [8 (l % 8), + 8)
  float4 scales;                       // of row l / 8
  uint4 rope;                          // of row l / 8, values [8 (l % 8), + 8)
  bool valid;                          // whether row l / 8 exists
};

// The index rows of all pieces of a group, as one sequence of steps. advance() leads to the first step, too.
template <int kRowsPerBlock>
class StepCursor {
 public:
  __device__ StepCursor(const Params& params, const SmemPlan& smem)
      : params_(params), smem_(smem), work_cursor_{params.schedule.first_unit(smem.group)} {}

  __device__ bool valid() const { return entry_ < end_entry_; }

  __device__ void advance() {
    entry_ += kStepRows;
    if (entry_ % kRowsPerBlock == 0) entry_ += kBlockTokens - kRowsPerBlock;
    if (entry_ >= end_entry_) next_piece();
  }

  // Index of row `row` of the step, as it stands in the caller's tensor; -1 behind the row's length, where nothing is
  // read.
  __device__ std::int32_t load_index(int row) const {
    return valid() && entry_ + row < valid_entries_ ? __ldg(indices_ + entry_ + row) : -1;
  }

 private:
  __device__ void next_piece() {
    Work work;
    do {
      if (!next_work(params_, smem_.group, work_cursor_, &work)) {
        entry_ = end_entry_ = 0;
        return;
      }
    } while (work.piece.first_block >= work.end_block);
    const Selection& selection = params_.problem.selection;
    indices_ = selection.indices + work.request * selection.stride_b + work.query_token * selection.stride_s;
    valid_entries_ = work.valid_entries;
    entry_ = work.piece.first_block * kBlockTokens + smem_.first_row;
    end_entry_ = work.end_block * kBlockTokens;
  }

  const Params& params_;
  const SmemPlan& smem_;
  const std::int32_t* indices_ = nullptr;
  WorkCursor work_cursor_;
  std::int32_t valid_entries_ = 0, entry_ = 0, end_entry_ = 0;
};

// What masked rows are read from, so that no load needs a condition: codes, scales and RoPE of zero.
__device__ const uint4 zero_row[v32::kRowBytes / sizeof(uint4)] = {};

// PERF: through L1, since the pieces of a row share sectors: 2 % of baseline (H200, 2026-11-30).
__device__ __forceinline__ uint4 load_16_bytes(const std::byte* address) {
  uint4 value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ uint2 load_8_bytes(const std::byte* address) {
  uint2 value;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address));
  return value;
}

// Where a lane's row lies.
__device__ __forceinline__ const std::byte* row_address(const Params& params, std::int32_t slot) {
  const auto n = static_cast<std::uint32_t>(slot);
  if (n >= params.slots.num_slots) return reinterpret_cast<const std::byte*>(zero_row);
  const std::uint32_t page = params.slots.page_divider.divide(n);
  const std::uint32_t offset = n - page * params.slots.page_size;
  const KvPool& kv = params.problem.kv;
  return kv.data + page * kv.page_stride_bytes + std::int64_t{offset} * v32::kRowBytes;
}

// Brings a row into L2 while nobody waits for it. It touches up to seven lines of 128 bytes; its eight lanes see to it.
__device__ __forceinline__ void prefetch_row(const std::byte* row, int lane) {
  const int offset = min(lane % kLanesPerRow * 128, v32::kRowBytes - 1);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(row + offset));
}

// slot: of the lane's row l / 8.
__device__ __forceinline__ void gather_rows(GatheredRows& rows, const Params& params, std::int32_t slot, int lane) {
  const std::byte* own = row_address(params, slot);
  rows.valid = static_cast<std::uint32_t>(slot) < params.slots.num_slots;
  const uint4 scales = load_16_bytes(own + v32::kScalesOffset);
  rows.scales = make_float4(__uint_as_float(scales.x), __uint_as_float(scales.y), __uint_as_float(scales.z),
                            __uint_as_float(scales.w));
  rows.rope = load_16_bytes(own + v32::kRopeOffset + lane % kLanesPerRow * sizeof(uint4));
#pragma unroll
  for (int row = 0; row < kRowsPerWarp; ++row) {
    const std::int32_t row_slot = __shfl_sync(0xffffffffu, slot, row * kLanesPerRow);
    const std::byte* codes = row_address(params, row_slot) + v32::kCodesOffset + lane * sizeof(uint2);
    rows.codes[row][0] = load_8_bytes(codes);
    rows.codes[row][1] = load_8_bytes(codes + v32::kNopeDim / kHalves);
  }
}

}  // namespace chiasma::sm90_sparse_fp8
