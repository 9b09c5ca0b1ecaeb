#include "cuda/split_cost.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace chiasma {
namespace {

constexpr double kBytesPerTbAndUs = 1e6;

// Measured on an H200 (driver 580.159.04, 2026-11-30) as the difference between graphs of calls with and without the
// merge: 1 to 32 requests of 16 and 128 heads, 2 to 32 parts; within 0.4 us, 0.8 for 2 parts of 32 requests.
constexpr double kMergeStartUs = 2.1;
constexpr double kMergePartUs = 0.06;  // for every part of a row
constexpr double kMergeTbPerS = 12.0;  // of parts, which are in L2
// More where parts have to be looked up because rows are cut anywhere.
constexpr double kMergeLookUpUs = 1.0;
// Of a call that does nothing but gather rows.
constexpr double kGatherStartUs = 4.0;

// Rows may be cut into parts that give a group up to this many pieces.
constexpr std::int64_t kMostRounds = 3;
constexpr std::int32_t kMostParts = 32;

struct Load {
  double busiest_us = 0;       // of the pieces of one group, without the first one's start
  std::int64_t num_parts = 0;  // of rows that are not whole
};

Load load_of(const tile::Schedule& schedule, const HeadCost& heads) {
  if (schedule.fixed_units) {
    const auto pieces = static_cast<double>(ceil_div(schedule.num_units(), schedule.num_groups));
    const double piece_us = schedule.blocks_per_unit * heads.block_us;
    return {pieces * piece_us + (pieces - 1) * heads.next_piece_us,
            schedule.units_per_row > 1 ? std::int64_t{schedule.num_units()} : 0};
  }
  Load load;
  for (std::int32_t group = 0; group < schedule.num_groups; ++group) {
    const std::int32_t first = schedule.first_unit(group);
    const std::int32_t end = schedule.first_unit(group + 1);
    if (first == end) continue;
    const std::int32_t pieces = (end - 1) / schedule.units_per_row - first / schedule.units_per_row + 1;
    const double us = (end - first) * schedule.blocks_per_unit * heads.block_us + (pieces - 1) * heads.next_piece_us;
    load.busiest_us = std::max(load.busiest_us, us);
    const bool starts_inside = first % schedule.units_per_row != 0;
    const bool ends_inside = end % schedule.units_per_row != 0;
    load.num_parts += pieces == 1 ? (starts_inside || ends_inside) : int{starts_inside} + int{ends_inside};
  }
  return load;
}

std::string microseconds(double us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", us);
  return text;
}

struct Best {
  tile::Schedule schedule{};
  double us = INFINITY;

  void offer(const tile::Schedule& other, double other_us) {
    if (other_us >= us) return;
    schedule = other;
    us = other_us;
  }
};

// Least time for a number of heads, over whole rows, equal parts of rows, and cuts wherever equal shares end.
Best best_schedule(const PlanRequest& request, const GroupShape& shape, const HeadCost& heads, const KernelCost& cost) {
  const std::int32_t groups = num_groups_that_fit(request, shape);
  Best best;
  const auto offer = [&](std::int32_t parts) {
    const tile::Schedule schedule = make_schedule(request, shape, parts);
    best.offer(schedule, estimate_us(request, schedule, heads, cost));
  };
  offer(1);
  const std::int32_t most = std::min(kMostParts, make_schedule(request, shape, 1).blocks_per_row);
  for (std::int32_t parts = 2; parts <= most && request.problem.num_rows() * parts <= kMostRounds * groups; ++parts) {
    offer(parts);
  }
  offer(kPartsAnywhere);
  return best;
}

double merge_us(const tile::Schedule& schedule, double part_bytes) {
  if (part_bytes == 0) return 0;
  const double us = kMergeStartUs + part_bytes / (kMergeTbPerS * kBytesPerTbAndUs);
  if (schedule.fixed_units) return us + schedule.units_per_row * kMergePartUs;
  const double parts_per_row = static_cast<double>(schedule.num_groups) / schedule.num_rows + 1;
  return us + parts_per_row * kMergePartUs + kMergeLookUpUs;
}

}  // namespace

double estimate_us(const PlanRequest& request, const tile::Schedule& schedule, const HeadCost& heads,
                   const KernelCost& cost) {
  const DecodeProblem& problem = request.problem;
  const Load load = load_of(schedule, heads);
  const double part_bytes =
      static_cast<double>(load.num_parts) * problem.h_q * kValueDim * static_cast<double>(sizeof(float));
  const double work_us = heads.start_us + load.busiest_us + part_bytes / (cost.store_tb_per_s * kBytesPerTbAndUs);
  const double row_bytes = static_cast<double>(schedule.num_rows) * schedule.blocks_per_row * kScheduledTokens *
                           static_cast<double>(traits_of(problem.format).token_bytes());
  const double gather_us = kGatherStartUs + row_bytes / (cost.gather_tb_per_s * kBytesPerTbAndUs);
  return std::max(work_us, gather_us) + merge_us(schedule, part_bytes);
}

const HeadCost& full_heads(const KernelCost& cost, int h_q) {
  for (const HeadCost& heads : cost.heads) {
    if (heads.heads >= h_q) return heads;
  }
  return cost.heads.back();
}

Cut choose_cut(const PlanRequest& request, const KernelCost& cost) {
  const int h_q = request.problem.h_q;
  const HeadCost& full = full_heads(cost, h_q);
  if (request.num_splits > 0 || request.batch_invariant) {
    const GroupShape shape = GroupShape::of_neighbours(h_q, full.heads);
    const tile::Schedule schedule = make_schedule(request, shape);
    return {shape, schedule, estimate_us(request, schedule, full, cost),
            "heads: as many as one thread block takes, whatever the batch"};
  }
  Cut cut{GroupShape::of_neighbours(h_q, full.heads), {}, INFINITY, {}};
  std::string estimates;
  for (const HeadCost& heads : cost.heads) {
    if (heads.heads > full.heads) break;
    const GroupShape shape = GroupShape::of_neighbours(h_q, heads.heads);
    const Best own = best_schedule(request, shape, heads, cost);
    estimates += concat(estimates.empty() ? "" : ", ", heads.heads, " heads ", microseconds(own.us));
    if (own.us > cut.us) continue;  // of equals the one with more heads, which reads rows less often
    cut.shape = shape;
    cut.schedule = own.schedule;
    cut.us = own.us;
  }
  cut.reason = concat("estimated us at best: ", estimates);
  return cut;
}

}  // namespace chiasma
