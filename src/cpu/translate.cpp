#include "cpu/cache_ops.h"
#include "cpu/threads.h"
#include "format/translate_token.h"

namespace chiasma::cpu {
namespace {

std::int64_t load_index(const TranslateProblem& problem, std::int64_t element) {
  if (problem.indices_are_int64) return static_cast<const std::int64_t*>(problem.indices)[element];
  return static_cast<const std::int32_t*>(problem.indices)[element];
}

// The request's row of the block table; null where all its tokens become -1.
const std::int32_t* table_of(const TranslateProblem& problem, std::int64_t i) {
  const std::int64_t request = problem.request == nullptr ? i : problem.request[i * problem.request_stride];
  if (request < 0 || request >= problem.requests) return nullptr;
  return problem.block_table + request * problem.block_table_stride;
}

}  // namespace

void translate_indices(const TranslateProblem& problem) {
  const ContextShare share{problem.cp_world, problem.cp_rank, problem.cp_interleave};
  const std::int64_t num_rows = problem.b * problem.s_q;
#pragma omp parallel for num_threads(available_threads()) if (num_rows >= kMinParallelRows)
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t i = row / problem.s_q;
    const std::int64_t s = row % problem.s_q;
    const std::int64_t from = i * problem.indices_stride_b + s * problem.indices_stride_s;
    std::int32_t* slots = problem.slots + i * problem.slots_stride_b + s * problem.slots_stride_s;
    const std::int32_t* table = problem.block_table == nullptr ? nullptr : table_of(problem, i);
    for (std::int64_t entry = 0; entry < problem.topk; ++entry) {
      const std::int64_t index = load_index(problem, from + entry);
      if (problem.block_table == nullptr) {
        slots[entry] = slot_or_none(index);
        continue;
      }
      const std::int64_t token = own_token(share, index);
      const bool is_there = table != nullptr && token >= 0 && token / problem.page_size < problem.max_pages;
      slots[entry] = is_there
                         ? slot_in_page(table[token / problem.page_size], problem.page_size, token % problem.page_size)
                         : kNoSlot;
    }
  }
}

}  // namespace chiasma::cpu
