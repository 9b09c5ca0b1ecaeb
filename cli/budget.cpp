#include "cli/budget.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace chiasma::cli {
namespace {

constexpr std::int64_t kBlockTokens = 64;
constexpr std::int64_t kBlockHeads = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

Budget make_budget(std::span<const tile::Need> needs, const std::function<double(std::string_view)>& rate_of) {
  Budget budget;
  for (const tile::Need& need : needs) {
    if (need.amount == 0) continue;
    const double rate = rate_of(need.ceiling);
    if (!(rate > 0)) throw std::out_of_range(std::string("no figure '") + need.ceiling + "' was measured");
    const double clk = need.amount / rate;
    budget.lines.push_back({need, rate, clk});
    const auto total = std::find_if(budget.resources.begin(), budget.resources.end(),
                                    [&](const ResourceTime& time) { return time.resource == need.resource; });
    if (total != budget.resources.end()) {
      total->clk += clk;
    } else {
      budget.resources.push_back({need.resource, clk});
    }
  }
  std::stable_sort(budget.resources.begin(), budget.resources.end(),
                   [](const ResourceTime& a, const ResourceTime& b) { return a.clk > b.clk; });
  return budget;
}

double blocks_per_multiprocessor(const harness::Case& spec, int multiprocessors) {
  const std::int64_t blocks = spec.num_rows() * ceil_div(spec.topk, kBlockTokens) * ceil_div(spec.h, kBlockHeads);
  return static_cast<double>(blocks) / multiprocessors;
}

double clk_per_block(double microseconds, double sm_mhz, double blocks) {
  return microseconds * sm_mhz / blocks;
}

}  // namespace chiasma::cli
