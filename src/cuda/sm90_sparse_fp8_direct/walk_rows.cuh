// Which rows a thread block needs, in the order of its pieces and blocks, and where they lie in the caches.
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_direct/smem_plan.h"
#include "cuda/sm90_sparse_fp8_direct/work_list.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// What masked rows are copied from, so that no copy needs a condition and no NaN of another row stays in its place:
// codes and bf16 values of 0, scales of 1.
struct alignas(16) MaskedRow {
  std::uint8_t codes[v32::kNopeDim];
  float scales[v32::kNumTiles];
  std::uint8_t bf16[kRopeDim * 2];
};
struct alignas(16) MaskedExponentRow {
  std::uint8_t codes[512];
  std::uint32_t exponents[4];
};
inline constexpr std::uint32_t kExponentsOfOne = 0x7f7f7f7f;
__device__ const MaskedRow masked_row = {{}, {1.0f, 1.0f, 1.0f, 1.0f}, {}};
__device__ const MaskedExponentRow masked_exponent_row = {
    {}, {kExponentsOfOne, kExponentsOfOne, kExponentsOfOne, kExponentsOfOne}};
__device__ const uint4 masked_zeros[kMaxKeyDim * 2 / 16] = {};

template <typename Config>
__device__ __forceinline__ const std::byte* masked_row_of() {
  constexpr bool kScalesInRow = Config::kScaling != Scaling::none && !Config::kTraits.has_scale_plane();
  if constexpr (!kScalesInRow) {
    static_assert(sizeof(masked_zeros) >= Config::kCopyBytes);
    return reinterpret_cast<const std::byte*>(masked_zeros);
  } else if constexpr (Config::kScaling == Scaling::ratios) {
    static_assert(Config::kScalesOffset == v32::kScalesOffset && sizeof(masked_row) >= Config::kCopyBytes);
    return reinterpret_cast<const std::byte*>(&masked_row);
  } else {
    static_assert(Config::kScalesOffset == 512 && sizeof(masked_exponent_row) >= Config::kCopyBytes);
    return reinterpret_cast<const std::byte*>(&masked_exponent_row);
  }
}

// A token's scales from the scale plane of its page, in registers until their place in shared memory is free.
template <int kBytes>
struct PlaneScales {
  std::uint32_t word[kBytes / 4];
};
template <>
struct PlaneScales<0> {};

// The rows of all pieces of a group as one sequence of blocks, for the threads of one warpgroup; each of the first 16
// lanes of a warp has one token of a block. Gatherers derive from this and copy.
template <typename Config, typename Smem>
class RowWalk {
 public:
  __device__ RowWalk(const SplitParams& params, Smem& smem)
      : params_(params),
        smem_(smem),
        unit_(params.schedule.first_unit(group_of_block<Config>(params))),
        warp_(static_cast<int>(ptx::uniform(threadIdx.x % kWarpgroupThreads / kWarpThreads))),
        lane_(threadIdx.x % kWarpThreads) {}

 protected:
  // gather(row, scales): of the lane's token, for every block; the ring moves on behind it.
  template <typename Gather>
  __device__ void for_each_block(Gather&& gather) {
    advance();
    while (step_ != Step::end) {
      const bool has_rows = step_ == Step::block;
      PlaneScales<Config::kPlaneBytes> scales;
      const std::byte* row = resolve(index_, scales);
      // The indices of the next block are on their way before those of this one are needed.
      advance();
      if (!has_rows) continue;
      gather(row, scales);
      stage_.advance();
    }
  }

  enum class Step { block, empty_piece, end };

  // Leads to the next step, at first to the first, and asks for its indices.
  __device__ void advance() {
    entry_ += kBlockTokens;
    bool begins = entry_ >= end_entry_;
    if constexpr (Config::kHasSecondCache) {
      if (begins && extra_end_entry_ > 0) begins = !begin_second_cache();
    }
    step_ = begins ? next_piece() : Step::block;
    const std::int32_t own = entry_ + token();
    index_ = own < valid_entries_ ? __ldg(indices_ + own) : -1;
    // PERF: not before, so that the first indices do not queue behind the loads of the query.
    if (begins) announce_piece();
  }

  __device__ Step next_piece() {
    const Work work = next_work<Config>(params_, group_of_block<Config>(params_), &unit_);
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
    if constexpr (Config::kHasSecondCache) remember_second_cache(work);
    if (!is_first) prefetch_query(work);
    return Step::block;
  }

  // Of a piece's blocks, those behind the first cache's are of the second.
  __device__ void remember_second_cache(const Work& work) {
    const std::int32_t first_end = work.blocks_of_first_cache() * kBlockTokens;
    const Selection& selection = params_.problem.extra_selection;
    is_second_ = false;
    extra_indices_ = selection.indices + work.request * selection.stride_b + work.query_token * selection.stride_s;
    extra_valid_ = work.valid_extra;
    extra_entry_ = max(entry_ - first_end, 0);
    extra_end_entry_ = end_entry_ - first_end;
    end_entry_ = min(end_entry_, first_end);
    if (entry_ >= end_entry_) begin_second_cache();
  }

  __device__ bool begin_second_cache() {
    is_second_ = true;
    indices_ = extra_indices_;
    valid_entries_ = extra_valid_;
    entry_ = extra_entry_;
    end_entry_ = extra_end_entry_;
    extra_end_entry_ = 0;
    return true;
  }

  // Pieces are described as soon as they are known, at most one ahead of the rows asked for.
  __device__ void announce_piece() {
    if (describes()) ptx::mbarrier_arrive(ptx::shared_address(&smem_.piece_full[piece_.index]));
    piece_.advance();
  }
  __device__ static bool describes() { return threadIdx.x % kWarpgroupThreads == 0; }

  __device__ const KvPool& pool() const {
    if constexpr (Config::kHasSecondCache) {
      if (is_second_) return params_.problem.extra_kv;
    }
    return params_.problem.kv;
  }

  // The row of a slot, and its scales where they lie elsewhere.
  __device__ const std::byte* resolve(std::int32_t slot, PlaneScales<Config::kPlaneBytes>& scales) const {
    const KvPool& kv = pool();
    const bool is_masked = slot < 0 || slot >= kv.num_slots();
    if constexpr (Config::kPlaneBytes > 0) {
#pragma unroll
      for (std::uint32_t& word : scales.word) word = kExponentsOfOne;
    }
    if (is_masked) return masked_row_of<Config>();
    const auto page_size = static_cast<std::uint32_t>(kv.page_size);
    const std::uint32_t page = static_cast<std::uint32_t>(slot) / page_size;
    const std::uint32_t offset = static_cast<std::uint32_t>(slot) - page * page_size;
    const std::byte* page_begin = kv.data + page * kv.page_stride_bytes;
    if constexpr (Config::kPlaneBytes == 8) {
      const uint2 words =
          __ldg(reinterpret_cast<const uint2*>(page_begin + plane_offset(Config::kFormat, page_size, offset)));
      scales.word[0] = words.x;
      scales.word[1] = words.y;
    } else if constexpr (Config::kPlaneBytes == 16) {
      const uint4 words =
          __ldg(reinterpret_cast<const uint4*>(page_begin + plane_offset(Config::kFormat, page_size, offset)));
      scales.word[0] = words.x;
      scales.word[1] = words.y;
      scales.word[2] = words.z;
      scales.word[3] = words.w;
    }
    return page_begin + std::int64_t{offset} * params_.row_bytes;
  }

  // The lane's token of a block, for the first 16 lanes.
  static constexpr int kRowsAtOnce = kTokensPerWarp / kWarpsPerWarpgroup;
  __device__ int token() const {
    return lane_ / kRowsAtOnce % kWarpsPerWarpgroup * kTokensPerWarp + warp_ * kRowsAtOnce + lane_ % kRowsAtOnce;
  }

  // PERF: into L2, so that the math warpgroups need not wait for DRAM when the piece's turn comes.
  __device__ void prefetch_query(const Work& work) const {
    const DecodeProblem& problem = params_.problem;
    const int first_head = smem_.first_head;
    const int num_heads = min(problem.h_q - first_head, Config::kHeads);
    const int thread = warp_ * kWarpThreads + ptx::lane_id_here();
    constexpr int kLineColumns = 64;  // of 128 bytes
    constexpr int kLines = (Config::kTraits.key_dim() - kRopeDim) / kLineColumns;
    static_assert(kRopeDim == kLineColumns && kWarpgroupThreads >= Config::kHeads);
    // PERF: one pointer at a time, since the gatherer's registers are few.
    if (thread < num_heads) ptx::prefetch_l2(query_rope_of(problem, work, first_head + thread));
    const bf16_t* query = query_of(problem, work, first_head);
    for (int line = thread; line < num_heads * kLines; line += kWarpgroupThreads) {
      ptx::prefetch_l2(query + line / kLines * problem.q_stride_h + line % kLines * kLineColumns);
    }
  }

  const SplitParams& params_;
  Smem& smem_;
  std::int32_t unit_;
  int warp_, lane_;
  Ring<Config::kStages> stage_;
  Ring<kPieceSlots> piece_;
  const std::int32_t* indices_ = nullptr;
  std::int32_t valid_entries_ = 0, entry_ = 0, end_entry_ = 0;
  std::int32_t index_ = -1;
  Step step_ = Step::end;
  // Of the piece's second cache: 0 blocks left where extra_end_entry_ is not above extra_entry_.
  bool is_second_ = false;
  const std::int32_t* extra_indices_ = nullptr;
  std::int32_t extra_valid_ = 0, extra_entry_ = 0, extra_end_entry_ = 0;
};

}  // namespace chiasma::sm90_sparse_fp8_direct
