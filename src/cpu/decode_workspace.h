// How the CPU decode's scratch memory is laid out: for each thread the buffers of one task, then, where rows are split
// over threads, the Partials of one wave. The one place that knows sizes and limits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/decode.h"
#include "cpu/decode_kernels.h"

namespace chiasma::cpu {

// Together below the 64 MB that the library promises, whatever the shapes.
inline constexpr std::int64_t kThreadScratchLimit = 44ll << 20;
inline constexpr std::int64_t kPartialLimit = 16ll << 20;

// The Partials of all heads of a row.
struct RowPartial {
  float* out;            // [heads, kValueDim] in groups of kHeadGroup heads
  float* max;            // [kMaxHeads]
  float* sum;            // [kMaxHeads]
  std::int64_t* tokens;  // [kMaxHeadGroups]

  Partial group(int idx) const {
    const std::int64_t head = std::int64_t{idx} * kHeadGroup;
    return {out + head * kValueDim, max + head, sum + head, tokens + idx};
  }
  void reset() const {
    std::fill_n(max, kMaxHeads, -std::numeric_limits<float>::infinity());
    std::fill_n(sum, kMaxHeads, 0.0f);
    std::fill_n(tokens, kMaxHeadGroups, std::int64_t{0});
  }
};

// Buffers that one thread works in; decode_kernels.h has the layouts.
struct ThreadScratch {
  float* queries;
  float* tile;
  float* scores;
  float* probabilities;
  float* rescale;
  RowPartial part, merged;  // only where threads take whole rows
};

// Hands out 64-byte aligned pieces of a buffer and counts them; counts alone when the buffer is null.
class Arena {
 public:
  explicit Arena(std::byte* begin) : begin_(begin) {}

  template <typename T>
  T* take(std::int64_t count) {
    T* piece = begin_ == nullptr ? nullptr : reinterpret_cast<T*>(begin_ + used_);
    used_ += (count * static_cast<std::int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  RowPartial take_partial(int heads) {
    RowPartial partial = {};
    partial.out = take<float>(std::int64_t{kValueDim} * heads);
    partial.max = take<float>(kMaxHeads);
    partial.sum = take<float>(kMaxHeads);
    partial.tokens = take<std::int64_t>(kMaxHeadGroups);
    return partial;
  }
  std::int64_t used() const { return used_; }

 private:
  static constexpr std::int64_t kAlignment = 64;
  std::byte* begin_;
  std::int64_t used_ = 0;
};

inline ThreadScratch take_thread_scratch(Arena& arena, const DecodeProblem& problem, bool whole_rows) {
  const int padded_heads = (problem.h_q + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  ThreadScratch scratch = {};
  scratch.queries = arena.take<float>(std::int64_t{key_dim(problem.format)} * padded_heads);
  scratch.tile = arena.take<float>(std::int64_t{kBlockTokens} * kTileStride);
  scratch.scores = arena.take<float>(std::int64_t{kBlockTokens} * kScoreStride);
  scratch.probabilities = arena.take<float>(std::int64_t{kBlockTokens} * kHeadGroup);
  scratch.rescale = arena.take<float>(kHeadGroup);
  if (!whole_rows) return scratch;
  scratch.part = arena.take_partial(problem.h_q);
  scratch.merged = arena.take_partial(problem.h_q);
  return scratch;
}

inline std::int64_t thread_scratch_bytes(const DecodeProblem& problem, bool whole_rows) {
  Arena arena(nullptr);
  take_thread_scratch(arena, problem, whole_rows);
  return arena.used();
}

inline std::int64_t partial_bytes(const DecodeProblem& problem) {
  Arena arena(nullptr);
  arena.take_partial(problem.h_q);
  return arena.used();
}

inline std::int64_t max_threads(const DecodeProblem& problem, bool whole_rows) {
  return kThreadScratchLimit / thread_scratch_bytes(problem, whole_rows);
}
inline std::int64_t max_partials(const DecodeProblem& problem) {
  return kPartialLimit / partial_bytes(problem);
}

class Workspace {
 public:
  Workspace(const DecodeProblem& problem, const DecodeSchedule& schedule, void* memory)
      : problem_(problem),
        whole_rows_(schedule.rows_per_wave == 0),
        thread_bytes_(thread_scratch_bytes(problem, whole_rows_)),
        partial_bytes_(partial_bytes(problem)),
        memory_(static_cast<std::byte*>(memory)),
        parts_offset_(thread_bytes_ * schedule.num_threads),
        merged_offset_(parts_offset_ + partial_bytes_ * schedule.rows_per_wave * schedule.splits_per_wave),
        bytes_(merged_offset_ + partial_bytes_ * schedule.rows_per_wave) {}

  std::size_t bytes() const { return static_cast<std::size_t>(bytes_); }
  ThreadScratch thread_scratch(int thread) const {
    Arena arena(memory_ + thread_bytes_ * thread);
    return take_thread_scratch(arena, problem_, whole_rows_);
  }
  RowPartial part(std::int64_t idx) const { return partial_at(parts_offset_ + partial_bytes_ * idx); }
  RowPartial merged(std::int64_t idx) const { return partial_at(merged_offset_ + partial_bytes_ * idx); }

 private:
  RowPartial partial_at(std::int64_t offset) const {
    Arena arena(memory_ + offset);
    return arena.take_partial(problem_.h_q);
  }

  const DecodeProblem& problem_;
  bool whole_rows_;
  std::int64_t thread_bytes_, partial_bytes_;
  std::byte* memory_;
  std::int64_t parts_offset_, merged_offset_, bytes_;
};

}  // namespace chiasma::cpu
