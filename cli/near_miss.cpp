#include "cli/near_miss.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace chiasma::cli {
namespace {

constexpr std::size_t kMostEdits = 2;

struct OtherWord {
  std::string_view word, meaning;
};
constexpr OtherWord kOtherWords[] = {
    {"scale", "sm_scale"},
    {"scaling", "sm_scale"},
    {"softmax_scale", "sm_scale"},
    {"attn_scale", "sm_scale"},
    {"sink", "attn_sink"},
    {"sinks", "attn_sink"},
    {"attention_sink", "attn_sink"},
    {"attention_sinks", "attn_sink"},
    {"length", "topk_length"},
    {"lengths", "topk_length"},
    {"topk_lens", "topk_length"},
    {"topk_indices", "indices"},
    {"indices_in_kvcache", "indices"},
    {"k_cache", "kv_cache"},
    {"cache", "kv_cache"},
    {"kv", "kv_cache"},
    {"query", "q"},
    {"q_pe", "q_rope"},
};

std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string meant_by(std::string_view name, std::span<const std::string_view> candidates) {
  for (const OtherWord& other : kOtherWords) {
    if (name == other.word && std::ranges::find(candidates, other.meaning) != candidates.end()) {
      return std::string(other.meaning);
    }
  }
  std::string_view best;
  std::size_t best_edits = kMostEdits + 1;
  for (const std::string_view candidate : candidates) {
    // Short names are near to anything; long ones are not worth comparing.
    if (candidate.size() < 2 * kMostEdits + 1 || name.size() > candidate.size() + kMostEdits) continue;
    const std::size_t edits = edits_between(name, candidate);
    if (edits < best_edits) {
      best = candidate;
      best_edits = edits;
    }
  }
  return std::string(best);
}

}  // namespace chiasma::cli
