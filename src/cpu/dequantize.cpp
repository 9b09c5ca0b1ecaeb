#include <algorithm>
#include <cstring>

#include "cpu/cache_ops.h"
#include "cpu/kv_rows.h"
#include "cpu/threads.h"

namespace chiasma::cpu {
namespace {

// kv: float32 or bf16 [key_dim(format)].
void dequantize_row(KvFormat format, const KvPool& cache, std::int64_t slot, void* kv, bool kv_is_bf16) {
  const RowTraits traits = traits_of(format);
  float key[kMaxKeyDim];
  load_key(format, cache, slot, key);
  for (int c = 0; c < traits.code_columns; ++c) key[c] = with_one_nan(key[c]);
  if (!kv_is_bf16) {
    std::copy_n(key, traits.key_dim(), static_cast<float*>(kv));
    return;
  }
  bf16_t* out = static_cast<bf16_t*>(kv);
  for (int c = 0; c < traits.code_columns; ++c) out[c] = to_bf16(key[c]);
  // Bits as they are: a NaN keeps its payload.
  std::memcpy(out + traits.code_columns, locate_row(format, cache, slot).row + traits.bf16_offset,
              static_cast<std::size_t>(traits.bf16_columns) * sizeof(bf16_t));
}

void* row_of(void* kv, bool kv_is_bf16, std::int64_t element) {
  if (kv_is_bf16) return static_cast<bf16_t*>(kv) + element;
  return static_cast<float*>(kv) + element;
}

void gather_row(const GatherProblem& problem, std::int64_t slot, std::int64_t row) {
  void* kv = row_of(problem.kv, problem.kv_is_bf16, row * problem.kv_stride);
  if (slot >= 0 && slot < problem.cache.num_slots()) {
    return dequantize_row(problem.format, problem.cache, slot, kv, problem.kv_is_bf16);
  }
  const std::size_t bytes = problem.kv_is_bf16 ? sizeof(bf16_t) : sizeof(float);
  std::memset(kv, 0, static_cast<std::size_t>(key_dim(problem.format)) * bytes);
}

std::int64_t load_integer(const IntegerView& view, std::int64_t index) {
  if (view.is_int64) return static_cast<const std::int64_t*>(view.data)[index * view.stride];
  return static_cast<const std::int32_t*>(view.data)[index * view.stride];
}

void gather_request(const GatherProblem& problem, std::int64_t request) {
  const std::int64_t page_size = problem.cache.page_size;
  const std::int64_t length =
      std::clamp<std::int64_t>(problem.seq_lens[request * problem.seq_lens_stride], 0, problem.max_pages * page_size);
  const std::int64_t start = load_integer(problem.starts, request);
  // Tokens whose rows are there, without a sum that overflows.
  if (start >= problem.rows || start <= -length) return;
  const std::int64_t first = std::max<std::int64_t>(0, -start);
  const std::int64_t last = std::min(length, problem.rows - start);
#pragma omp parallel num_threads(available_threads()) if (last - first >= kMinParallelRows)
  {
    const DefaultFloatEnvironment environment;
#pragma omp for
    for (std::int64_t token = first; token < last; ++token) {
      const std::int64_t page = problem.block_table[request * problem.block_table_stride + token / page_size];
      const std::int64_t slot = page < 0 ? -1 : page * page_size + token % page_size;
      gather_row(problem, slot, start + token);
    }
  }
}

}  // namespace

void dequantize(const DequantizeProblem& problem) {
  const std::int64_t num_slots = problem.cache.num_slots();
#pragma omp parallel num_threads(available_threads()) if (num_slots >= kMinParallelRows)
  {
    const DefaultFloatEnvironment environment;
#pragma omp for
    for (std::int64_t slot = 0; slot < num_slots; ++slot) {
      const std::int64_t element = slot / problem.cache.page_size * problem.kv_stride_page +
                                   slot % problem.cache.page_size * problem.kv_stride_token;
      dequantize_row(problem.format, problem.cache, slot, row_of(problem.kv, problem.kv_is_bf16, element),
                     problem.kv_is_bf16);
    }
  }
}

void gather_dequantize(const GatherProblem& problem) {
  if (problem.slots.data == nullptr) {
    for (std::int64_t request = 0; request < problem.b; ++request) gather_request(problem, request);
    return;
  }
#pragma omp parallel num_threads(available_threads()) if (problem.rows >= kMinParallelRows)
  {
    const DefaultFloatEnvironment environment;
#pragma omp for
    for (std::int64_t row = 0; row < problem.rows; ++row) gather_row(problem, load_integer(problem.slots, row), row);
  }
}

}  // namespace chiasma::cpu
