// Stage gather_kv: stored rows from the cache into producer registers. They are brought into L2 a step ahead, since
// bytes in flight are what the gather's speed depends on.
#pragma once

#include "cuda/sm90_sparse_fp8/smem_plan.h"
#include "cuda/sm90_sparse_fp8/work_list.cuh"

namespace chiasma::sm90_sparse_fp8 {

// Four rows of a warp.
struct GatheredRows {
  uint4 codes[kRowsPerWarp];  // lane l: codes [16 l, 16 l + 16) of each row
  float scale;                // lane l: of row l / 4 % 4, tile l % 4
  uint4 rope;                 // lane l: RoPE values [8 (l % 8), + 8) of row l / 8
  bool valid;                 // lane l: whether row l / 4 % 4 exists
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

__device__ __forceinline__ uint4 load_16_bytes(const std::byte* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ float load_float(const std::byte* address) {
  float value;
  asm volatile("ld.global.nc.L1::no_allocate.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}

// Where each row of a step lies; lane l knows row l % 4.
struct RowAddresses {
  const std::byte* own;

  __device__ static RowAddresses resolve(const KvPool& kv, std::int32_t slot) {
    RowAddresses result;
    const bool valid = slot >= 0 && slot < kv.num_slots();
    const std::uint32_t page_size = static_cast<std::uint32_t>(kv.page_size);
    const std::uint32_t page = static_cast<std::uint32_t>(slot) / page_size;
    const std::uint32_t offset = static_cast<std::uint32_t>(slot) - page * page_size;
    result.own = valid ? kv.data + page * kv.page_stride_bytes + std::int64_t{offset} * v32::kRowBytes
                       : reinterpret_cast<const std::byte*>(zero_row);
    return result;
  }
  __device__ const std::byte* row(int index) const {
    return reinterpret_cast<const std::byte*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own), index));
  }
};

// Brings the rows into L2 while nobody waits for them. A row touches up to seven lines of 128 bytes; eight lanes see to
// it.
__device__ __forceinline__ void prefetch_rows(const RowAddresses& addresses, int lane) {
  const int offset = min(lane % 8 * 128, v32::kRowBytes - 1);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(addresses.row(lane / 8) + offset));
}

__device__ __forceinline__ void gather_rows(GatheredRows& rows, const RowAddresses& addresses, int lane) {
  const int row = lane / 4 % kRowsPerWarp;
  const std::byte* scale_row = addresses.row(row);
  rows.valid = scale_row != reinterpret_cast<const std::byte*>(zero_row);
  rows.scale = load_float(scale_row + v32::kScalesOffset + lane % 4 * v32::kScaleBytes);
  rows.rope = load_16_bytes(addresses.row(lane / 8) + v32::kRopeOffset + lane % 8 * 16);
#pragma unroll
  for (int index = 0; index < kRowsPerWarp; ++index) {
    rows.codes[index] = load_16_bytes(addresses.row(index) + v32::kCodesOffset + lane * 16);
  }
}

}  // namespace chiasma::sm90_sparse_fp8
