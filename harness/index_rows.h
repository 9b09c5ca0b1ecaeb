// Which slots each query token of a case selects, and the lengths that cut rows short.
#pragma once

#include <cstdint>

#include "harness/case.h"
#include "harness/kv_pool.h"

namespace chiasma::harness {

// Writes the `topk` indices of query token `row` of `request`. Entries behind the request's length are as good as those
// before, so that a reader who goes too far gets a wrong answer.
void make_index_row(const Case& spec, const PoolLayout& layout, std::int64_t request, std::int64_t row,
                    std::int64_t topk, std::int32_t* out);

// Some lengths of mode random lie outside [0, topk], where they are to be clamped.
// number: of the request, or of the query token in mode rows.
std::int32_t make_length(LengthMode mode, std::uint64_t key, std::int64_t number, std::int64_t topk);

}  // namespace chiasma::harness
