// The arithmetic of `chiasma budget`: needs of a block divided by measured rates, and a measured time as clocks a
// block.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/tile/need.h"
#include "harness/case.h"

namespace chiasma::cli {

struct BudgetLine {
  tile::Need need;
  double rate;  // of the need's ceiling, a clock and multiprocessor
  double clk;
};

struct ResourceTime {
  tile::Resource resource;
  double clk;
};

struct Budget {
  std::vector<BudgetLine> lines;        // of needs that are not 0, in their order
  std::vector<ResourceTime> resources;  // busiest first
};

// rate_of(ceiling): what that figure says, per clock and multiprocessor. Throws std::out_of_range when it is not
// positive, that is, when no such figure was measured.
Budget make_budget(std::span<const tile::Need> needs, const std::function<double(std::string_view)>& rate_of);

// Blocks of 64 tokens and 64 heads that a multiprocessor works on in one call, if all get the same share. Every index
// must be valid.
double blocks_per_multiprocessor(const harness::Case& spec, int multiprocessors);

// Of one block, from the time of a call.
double clk_per_block(double microseconds, double sm_mhz, double blocks);

}  // namespace chiasma::cli
