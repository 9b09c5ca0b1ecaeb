// What a decode takes by a model, and the cut that takes least: how many heads a thread block has, and into how many
// parts rows are cut. Pure arithmetic on measured constants; host code.
#pragma once

#include <array>
#include <string>

#include "cuda/split_plan.h"

namespace chiasma {

// A kernel's thread block with a number of heads, in microseconds: everything but its blocks of rows, one of those, and
// every further piece of rows that it works on.
struct HeadCost {
  int heads;
  double start_us, block_us, next_piece_us;
};

// One kernel's constants, with their source where they are defined.
struct KernelCost {
  std::array<HeadCost, 4> heads;  // from few to many; a power of two each
  double store_tb_per_s;          // at which all thread blocks together write their parts
  double gather_tb_per_s = 3.0;   // at which random rows come from DRAM
};

struct Cut {
  GroupShape shape;
  tile::Schedule schedule;
  double us;           // estimated, of decode and merge together
  std::string reason;  // with the estimates that decided
};

// Fewest heads that are costed and hold all of h_q, or the most that are.
const HeadCost& full_heads(const KernelCost& cost, int h_q);

// By the model. Where the caller wants parts that do not depend on the batch, neither do heads: full_heads(), in the
// parts that make_schedule() says.
Cut choose_cut(const PlanRequest& request, const KernelCost& cost);

// Of decode and merge together.
double estimate_us(const PlanRequest& request, const tile::Schedule& schedule, const HeadCost& heads,
                   const KernelCost& cost);

}  // namespace chiasma
