#include "harness/index_rows.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "harness/random.h"

namespace chiasma::harness {
namespace {

constexpr std::int64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();

enum Stream : std::uint64_t { kTokenStream = 101, kSameStream, kValidStream, kGarbageStream, kLengthStream };

std::int64_t random_token(const PoolLayout& layout, std::int64_t row, std::int64_t entry) {
  const std::int64_t pool = layout.tokens_per_request;
  // Entries beyond the pool's size start another round in another order.
  const std::uint64_t key = derive(derive(derive(layout.key, kTokenStream), row), entry / pool);
  return static_cast<std::int64_t>(
      permute(static_cast<std::uint64_t>(entry % pool), static_cast<std::uint64_t>(pool), key));
}

std::vector<std::int64_t> make_tokens(const Case& spec, const PoolLayout& layout, std::int64_t request,
                                      std::int64_t row, std::int64_t topk) {
  const std::int64_t pool = layout.tokens_per_request;
  const std::int64_t window = std::min(topk, pool);
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(topk));
  for (std::int64_t entry = 0; entry < topk; ++entry) {
    std::int64_t& token = tokens[static_cast<std::size_t>(entry)];
    switch (spec.idx) {
      case IndexPattern::kRandom:
      case IndexPattern::kSorted: token = random_token(layout, row, entry); break;
      case IndexPattern::kWindow: token = pool - window + entry % window; break;
      case IndexPattern::kSame:
        token = static_cast<std::int64_t>(below(derive(layout.key, kSameStream), request, pool));
        break;
    }
  }
  if (spec.idx == IndexPattern::kSorted) std::sort(tokens.begin(), tokens.end());
  return tokens;
}

// Anything but a slot: just past the end, far past it, negative, and the extremes of the type.
std::int32_t garbage_index(std::uint64_t random, std::int64_t num_slots) {
  const std::int64_t beyond = kMaxIndex - num_slots + 1;  // how many indices lie past the end, >= 1
  const std::uint64_t pick = random >> 8;
  std::int64_t index = 0;
  switch (random % 5) {
    case 0: index = num_slots; break;
    case 1: index = num_slots + static_cast<std::int64_t>(pick % static_cast<std::uint64_t>(beyond)); break;
    case 2: index = -1 - static_cast<std::int64_t>(pick % static_cast<std::uint64_t>(kMaxIndex)); break;
    case 3: index = kMaxIndex; break;
    default: index = -kMaxIndex - 1; break;
  }
  return static_cast<std::int32_t>(index);
}

}  // namespace

void make_index_row(const Case& spec, const PoolLayout& layout, std::int64_t request, std::int64_t row,
                    std::int64_t topk, std::int32_t* out) {
  constexpr std::int32_t kMasked = -1;
  const bool has_tokens = layout.tokens_per_request > 0;
  std::vector<std::int64_t> tokens;
  if (has_tokens) tokens = make_tokens(spec, layout, request, row, topk);
  const std::uint64_t valid_key = derive(derive(layout.key, kValidStream), row);
  const std::uint64_t garbage_key = derive(derive(layout.key, kGarbageStream), row);
  for (std::int64_t entry = 0; entry < topk; ++entry) {
    if (has_tokens && uniform(valid_key, entry) < spec.valid) {
      out[entry] = static_cast<std::int32_t>(layout.slot(request, tokens[static_cast<std::size_t>(entry)]));
    } else {
      out[entry] = spec.garbage ? garbage_index(derive(garbage_key, entry), layout.num_slots()) : kMasked;
    }
  }
}

std::int32_t make_length(LengthMode mode, std::uint64_t key, std::int64_t number, std::int64_t topk) {
  switch (mode) {
    case LengthMode::kNone:
    case LengthMode::kFull: return static_cast<std::int32_t>(topk);
    case LengthMode::kZero: return 0;
    case LengthMode::kRandom:
    case LengthMode::kRows: break;
  }
  constexpr std::uint64_t kOneInOutside = 8;
  const std::uint64_t length_key = derive(derive(key, kLengthStream), number);
  switch (below(length_key, 0, kOneInOutside)) {
    case 0: return static_cast<std::int32_t>(topk) + 1000;
    case 1: return -3;
    default: return static_cast<std::int32_t>(below(length_key, 1, topk + 1));
  }
}

}  // namespace chiasma::harness
