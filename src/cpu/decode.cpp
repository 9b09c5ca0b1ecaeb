// Strings the stages of decode_kernels.h together.
//
// The entries of a row (a query token's selection, then its extra selection) are divided into splits. A split attends
// to its valid entries, block by block, which gives a Partial; a row's Partials are merged from left to right. Who
// computes which split, and when, therefore cannot change a bit of the result. Two ways through the work:
//   whole rows   each thread takes rows and merges as it goes; for many rows
//   waves        threads share the splits of a few rows at a time, through scratch memory; for few rows
#include "cpu/decode.h"

#include <omp.h>

#include <algorithm>
#include <utility>

#include "cpu/decode_kernels.h"
#include "cpu/decode_workspace.h"
#include "cpu/threads.h"

namespace chiasma::cpu {
namespace {

constexpr std::int64_t kAutomaticSplitTokens = 512;
// With fewer rows than this for each thread, threads that wait for the last whole row would cost more than merging.
constexpr std::int64_t kManyRowsPerThread = 8;
constexpr int kCacheLine = 64;

// Part of a selection: entries [begin, end) of one query token, of one pool.
struct EntryRange {
  const KvPool* pool;
  const std::int32_t* indices;
  std::int64_t begin, end;
};

// The part of `selection` that falls into entries [begin, end) and before the request's length.
EntryRange clip_selection(const KvPool& pool, const Selection& selection, std::int64_t request,
                          std::int64_t query_token, std::int64_t begin, std::int64_t end) {
  std::int64_t length = selection.topk;
  if (selection.topk > 0 && selection.length != nullptr) {
    length = std::clamp<std::int64_t>(
        selection.length[request * selection.length_stride_b + query_token * selection.length_stride_s], 0,
        selection.topk);
  }
  const std::int32_t* indices =
      selection.topk > 0 ? selection.indices + request * selection.stride_b + query_token * selection.stride_s
                         : nullptr;
  return {&pool, indices, std::clamp<std::int64_t>(begin, 0, length), std::clamp<std::int64_t>(end, 0, length)};
}

// Hands out the valid entries of a split in order.
class EntryCursor {
 public:
  EntryCursor(const DecodeProblem& problem, std::int64_t row, std::int64_t begin, std::int64_t end)
      : format_(problem.format) {
    const std::int64_t request = row / problem.s_q;
    const std::int64_t query_token = row % problem.s_q;
    const std::int64_t topk = problem.selection.topk;
    ranges_[0] = clip_selection(problem.kv, problem.selection, request, query_token, begin, end);
    ranges_[1] =
        clip_selection(problem.extra_kv, problem.extra_selection, request, query_token, begin - topk, end - topk);
  }

  // Locates the next valid entries, at most kBlockTokens; returns how many.
  int gather_kv(RowBytes* rows) {
    int count = 0;
    for (EntryRange& range : ranges_) {
      for (; range.begin < range.end && count < kBlockTokens; ++range.begin) {
        const std::int64_t slot = range.indices[range.begin];
        if (slot < 0 || slot >= range.pool->num_slots()) continue;
        rows[count++] = locate_row(format_, *range.pool, slot);
      }
    }
    return count;
  }

 private:
  KvFormat format_;
  EntryRange ranges_[2];
};

// Always inlined: GCC 12 takes a function that only prefetches for one without effect and drops calls to it.
[[gnu::always_inline]] inline void prefetch_rows(KvFormat format, const RowBytes* rows, int begin, int end) {
  for (int i = begin; i < end; ++i) {
    for (int offset = 0; offset < row_stride_bytes(format); offset += kCacheLine) {
      __builtin_prefetch(rows[i].row + offset);
    }
    if (traits_of(format).has_scale_plane()) __builtin_prefetch(rows[i].scales);
  }
}

struct Block {
  RowBytes rows[kBlockTokens];
  int tokens;
};

// One group of heads over one block. PERF: meanwhile the group's share of the next block's rows arrives, a few at a
// time.
void attend_group(const DecodeProblem& problem, int group, int tokens, const Block& next, const ThreadScratch& scratch,
                  const Partial& partial) {
  const int dim = key_dim(problem.format);
  const int heads = heads_of_group(problem.h_q, group);
  const float* queries = scratch.queries + std::int64_t{group} * kHeadGroup * dim;
  score_qk(queries, scratch.tile, tokens, heads, dim, problem.sm_scale, scratch.scores);
  softmax_step(scratch.scores, tokens, heads, partial, scratch.rescale, scratch.probabilities);
  const float* rescale = *partial.tokens == 0 ? nullptr : scratch.rescale;

  constexpr int kNumChunks = kValueDim / kValueChunk;
  const int num_pieces = num_head_groups(problem.h_q) * kNumChunks;
  for (int chunk = 0; chunk < kNumChunks; ++chunk) {
    const int piece = group * kNumChunks + chunk;
    prefetch_rows(problem.format, next.rows, next.tokens * piece / num_pieces, next.tokens * (piece + 1) / num_pieces);
    accumulate_pv(scratch.probabilities, scratch.tile, tokens, heads, rescale, chunk * kValueChunk,
                  (chunk + 1) * kValueChunk, partial.out);
  }
  *partial.tokens += tokens;
}

// Attention of row over entries [begin, end); scratch.queries holds the row's queries.
void attend_split(const DecodeProblem& problem, std::int64_t row, std::int64_t begin, std::int64_t end,
                  const ThreadScratch& scratch, const RowPartial& partial) {
  partial.reset();
  EntryCursor cursor(problem, row, begin, end);
  Block blocks[2];
  blocks[0].tokens = cursor.gather_kv(blocks[0].rows);
  prefetch_rows(problem.format, blocks[0].rows, 0, blocks[0].tokens);
  for (int current = 0; blocks[current].tokens > 0; current = 1 - current) {
    const Block& block = blocks[current];
    Block& next = blocks[1 - current];
    next.tokens = cursor.gather_kv(next.rows);
    dequantize_kv(problem.format, block.rows, block.tokens, scratch.tile);
    for (int group = 0; group < num_head_groups(problem.h_q); ++group) {
      attend_group(problem, group, block.tokens, next, scratch, partial.group(group));
    }
  }
}

void pack_row_queries(const DecodeProblem& problem, std::int64_t row, float* queries) {
  const std::int64_t request = row / problem.s_q;
  const std::int64_t query_token = row % problem.s_q;
  const bf16_t* q = problem.q + request * problem.q_stride_b + query_token * problem.q_stride_s;
  const bf16_t* rope = problem.q_rope + request * problem.q_rope_stride_b + query_token * problem.q_rope_stride_s;
  const int dim = key_dim(problem.format);
  for (int group = 0; group < num_head_groups(problem.h_q); ++group) {
    const std::int64_t head = std::int64_t{group} * kHeadGroup;
    pack_queries({q + head * problem.q_stride_h, problem.q_stride_h, rope + head * problem.q_rope_stride_h,
                  problem.q_rope_stride_h},
                 heads_of_group(problem.h_q, group), dim, queries + head * dim);
  }
}

void store_group(const DecodeProblem& problem, std::int64_t row, int group, const Partial& partial) {
  const std::int64_t request = row / problem.s_q;
  const std::int64_t query_token = row % problem.s_q;
  const std::int64_t head = std::int64_t{group} * kHeadGroup;
  const float* sink = problem.attn_sink == nullptr ? nullptr : problem.attn_sink + head * problem.attn_sink_stride;
  store_out(partial, heads_of_group(problem.h_q, group),
            {.out = problem.out + request * problem.out_stride_b + query_token * problem.out_stride_s +
                    head * problem.out_stride_h,
             .out_stride = problem.out_stride_h,
             .lse = problem.lse + request * problem.lse_stride_b + query_token * problem.lse_stride_s +
                    head * problem.lse_stride_h,
             .lse_stride = problem.lse_stride_h,
             .sink = sink,
             .sink_stride = problem.attn_sink_stride});
}

void decode_row(const DecodeProblem& problem, const DecodeSchedule& schedule, std::int64_t row,
                const ThreadScratch& scratch) {
  pack_row_queries(problem, row, scratch.queries);
  RowPartial merged = scratch.merged;
  RowPartial part = scratch.part;
  const int num_groups = num_head_groups(problem.h_q);
  for (std::int64_t split = 0; split < schedule.num_splits; ++split) {
    const std::int64_t begin = split * schedule.tokens_per_split;
    attend_split(problem, row, begin, begin + schedule.tokens_per_split, scratch, part);
    if (split == 0) {
      std::swap(merged, part);
      continue;
    }
    for (int group = 0; group < num_groups; ++group) {
      merge_partials(part.group(group), merged.group(group), heads_of_group(problem.h_q, group));
    }
  }
  for (int group = 0; group < num_groups; ++group) store_group(problem, row, group, merged.group(group));
}

void decode_whole_rows(const DecodeProblem& problem, const DecodeSchedule& schedule, const Workspace& workspace) {
  const std::int64_t num_rows = problem.num_rows();
#pragma omp parallel num_threads(team_size(schedule.num_threads))
  {
    const DefaultFloatEnvironment environment;
    const ThreadScratch scratch = workspace.thread_scratch(omp_get_thread_num());
#pragma omp for schedule(dynamic)
    for (std::int64_t row = 0; row < num_rows; ++row) decode_row(problem, schedule, row, scratch);
  }
}

// Rows [row_begin, row_end) and their splits [split_begin, split_end), whose Partials are in scratch memory together.
struct Wave {
  std::int64_t row_begin, row_end, split_begin, split_end;
  std::int64_t num_rows() const { return row_end - row_begin; }
  std::int64_t num_splits() const { return split_end - split_begin; }
};

void attend_wave(const DecodeProblem& problem, const DecodeSchedule& schedule, const Wave& wave,
                 const Workspace& workspace) {
  const std::int64_t num_tasks = wave.num_rows() * wave.num_splits();
#pragma omp parallel num_threads(team_size(schedule.num_threads))
  {
    const DefaultFloatEnvironment environment;
    const ThreadScratch scratch = workspace.thread_scratch(omp_get_thread_num());
    std::int64_t packed_row = -1;
#pragma omp for schedule(dynamic)
    for (std::int64_t task = 0; task < num_tasks; ++task) {
      const std::int64_t row = wave.row_begin + task / wave.num_splits();
      const std::int64_t begin = (wave.split_begin + task % wave.num_splits()) * schedule.tokens_per_split;
      if (row != packed_row) pack_row_queries(problem, row, scratch.queries);
      packed_row = row;
      attend_split(problem, row, begin, begin + schedule.tokens_per_split, scratch, workspace.part(task));
    }
  }
}

void merge_wave(const DecodeProblem& problem, const DecodeSchedule& schedule, const Wave& wave,
                const Workspace& workspace) {
  const int num_groups = num_head_groups(problem.h_q);
  const std::int64_t num_tasks = wave.num_rows() * num_groups;
#pragma omp parallel num_threads(team_size(schedule.num_threads))
  {
    const DefaultFloatEnvironment environment;
#pragma omp for schedule(static)
    for (std::int64_t task = 0; task < num_tasks; ++task) {
      const std::int64_t row_in_wave = task / num_groups;
      const int group = static_cast<int>(task % num_groups);
      const Partial merged = workspace.merged(row_in_wave).group(group);
      if (wave.split_begin == 0) *merged.tokens = 0;
      for (std::int64_t i = 0; i < wave.num_splits(); ++i) {
        const RowPartial part = workspace.part(row_in_wave * wave.num_splits() + i);
        merge_partials(part.group(group), merged, heads_of_group(problem.h_q, group));
      }
      if (wave.split_end == schedule.num_splits) store_group(problem, wave.row_begin + row_in_wave, group, merged);
    }
  }
}

void decode_waves(const DecodeProblem& problem, const DecodeSchedule& schedule, const Workspace& workspace) {
  const std::int64_t num_rows = problem.num_rows();
  for (std::int64_t row = 0; row < num_rows; row += schedule.rows_per_wave) {
    for (std::int64_t split = 0; split < schedule.num_splits; split += schedule.splits_per_wave) {
      const Wave wave = {row, std::min(row + schedule.rows_per_wave, num_rows), split,
                         std::min(split + schedule.splits_per_wave, schedule.num_splits)};
      attend_wave(problem, schedule, wave, workspace);
      merge_wave(problem, schedule, wave, workspace);
    }
  }
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

}  // namespace

DecodeSchedule schedule_decode(const DecodeProblem& problem, int num_splits, int num_threads) {
  const std::int64_t entries = std::max<std::int64_t>(1, problem.selection.topk + problem.extra_selection.topk);
  const std::int64_t num_rows = problem.num_rows();
  DecodeSchedule schedule = {};
  schedule.tokens_per_split = num_splits == 0 ? kAutomaticSplitTokens : divide_up(entries, num_splits);
  schedule.num_splits = divide_up(entries, schedule.tokens_per_split);

  const std::int64_t threads = num_threads == 0 ? available_threads() : num_threads;
  const bool whole_rows =
      schedule.num_splits == 1 || threads == 1 || num_rows % threads == 0 || num_rows >= kManyRowsPerThread * threads;
  const std::int64_t tasks = std::max<std::int64_t>(1, whole_rows ? num_rows : num_rows * schedule.num_splits);
  schedule.num_threads = static_cast<int>(std::min({threads, tasks, max_threads(problem, whole_rows)}));
  if (!whole_rows) {
    // A row's merged result needs a place beside its parts.
    const std::int64_t places = max_partials(problem);
    schedule.splits_per_wave = std::min(schedule.num_splits, places - 1);
    schedule.rows_per_wave = std::min(num_rows, places / (schedule.splits_per_wave + 1));
  }
  schedule.workspace_bytes = Workspace(problem, schedule, nullptr).bytes();
  return schedule;
}

void run_decode(const DecodeProblem& problem, const DecodeSchedule& schedule, void* workspace) {
  const Workspace scratch(problem, schedule, workspace);
  if (schedule.rows_per_wave == 0) return decode_whole_rows(problem, schedule, scratch);
  decode_waves(problem, schedule, scratch);
}

std::string simd_target() {
  return kernel_target();
}

}  // namespace chiasma::cpu
