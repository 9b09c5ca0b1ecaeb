#include <omp.h>

#include <cstring>

#include "cpu/cache_ops.h"
#include "cpu/kv_rows.h"
#include "cpu/threads.h"
#include "format/quantize_tile.h"

namespace chiasma::cpu {
namespace {

void store_scale(ScaleType type, float scale, int tile, std::byte* scales) {
  if (type == ScaleType::ue8m0) {
    scales[tile] = static_cast<std::byte>(ue8m0_of(scale));
  } else {
    std::memcpy(scales + tile * static_cast<int>(sizeof(scale)), &scale, sizeof(scale));
  }
}

// A new row's number `column`, from kv or, of the rotary ones, from rope.
struct NewRow {
  const bf16_t* kv;
  const bf16_t* rope;
  int rope_begin;

  bf16_t operator[](int column) const { return column < rope_begin ? kv[column] : rope[column - rope_begin]; }
};

// Tiles of codes with a scale each. Returns how many of their inputs are NaN or infinite.
int quantize_tiles(const QuantizeProblem& problem, const NewRow& kv, std::byte* row, std::byte* scales) {
  const RowTraits traits = traits_of(problem.format);
  int num_nonfinite = 0;
  for (int tile = 0; tile < traits.num_scales(); ++tile) {
    const int first = tile * traits.scale_columns;
    float values[kMaxKeyDim];
    for (int i = 0; i < traits.scale_columns; ++i) values[i] = to_float(kv[first + i]);
    auto* codes = reinterpret_cast<std::uint8_t*>(row + first);
    if (traits.scale_type == ScaleType::cache) {
      num_nonfinite += quantize_with(values, traits.scale_columns, problem.pool.scale, codes);
      continue;
    }
    const TileScale result = quantize_tile(values, traits.scale_columns, problem.scale, codes);
    store_scale(traits.scale_type, result.scale, tile, scales);
    num_nonfinite += result.num_nonfinite;
  }
  return num_nonfinite;
}

// Returns how many of the row's inputs are NaN or infinite.
int quantize_row(const QuantizeProblem& problem, const NewRow& kv, std::byte* row, std::byte* scales) {
  const RowTraits traits = traits_of(problem.format);
  int num_nonfinite = quantize_tiles(problem, kv, row, scales);
  for (int c = 0; c < traits.bf16_columns; ++c) {
    const bf16_t value = kv[traits.code_columns + c];
    std::memcpy(row + traits.bf16_offset + c * static_cast<int>(sizeof(value)), &value, sizeof(value));
    num_nonfinite += is_finite(to_float(value)) ? 0 : 1;
  }
  for (int c = traits.num_scales(); c < traits.plane_group_bytes; ++c) scales[c] = std::byte{0};
  return num_nonfinite;
}

}  // namespace

void quantize(const QuantizeProblem& problem) {
  const KvPool& pool = problem.pool;
  std::int64_t num_nonfinite = 0, num_skipped = 0;
  // WHY each thread walks the whole mapping and takes the slots that are its own: rows that share a slot are then
  // stored by one thread in their order, so that the last one stays.
#pragma omp parallel num_threads(available_threads()) reduction(+ : num_nonfinite, num_skipped) if (problem.tokens >= kMinParallelRows)
  {
    const DefaultFloatEnvironment environment;
    const int num_threads = omp_get_num_threads();
    const int thread = omp_get_thread_num();
    for (std::int64_t token = 0; token < problem.tokens; ++token) {
      const std::int64_t slot =
          problem.slot_mapping == nullptr ? token : problem.slot_mapping[token * problem.slot_mapping_stride];
      if (slot < 0 || slot >= pool.num_slots()) {
        num_skipped += thread == 0 && slot != -1 ? 1 : 0;
        continue;
      }
      if (slot % num_threads != thread) continue;
      const RowBytes bytes = locate_row(problem.format, pool, slot);
      std::byte* row = problem.cache + (bytes.row - pool.data);
      const bool has_scales = bytes.scales != nullptr && traits_of(problem.format).scale_type != ScaleType::cache;
      std::byte* scales = has_scales ? problem.cache + (bytes.scales - pool.data) : nullptr;
      const NewRow kv{problem.kv + token * problem.kv_stride, problem.rope + token * problem.rope_stride,
                      key_dim(problem.format) - kRopeDim};
      num_nonfinite += quantize_row(problem, kv, row, scales);
    }
  }
  if (problem.nonfinite_count != nullptr) *problem.nonfinite_count = num_nonfinite;
  if (problem.skipped_count != nullptr) *problem.skipped_count = num_skipped;
}

}  // namespace chiasma::cpu
