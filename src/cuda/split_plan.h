// Plans of the kernels that cut rows of selected entries into blocks of 64 and share them out among groups of thread
// blocks: the schedule, what it needs of scratch memory, and the merge behind the kernel. Host code.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "api/registry.h"
#include "cuda/tile/schedule.h"

namespace chiasma {

inline constexpr int kScheduledTokens = 64;  // of a block

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// How a kernel is laid out for a number of heads: a group is the thread blocks that share a row.
struct GroupShape {
  int blocks_per_group;
  int heads_per_block;
  bool is_cluster;

  // Without a cluster: as many neighbours as h_q heads need.
  static GroupShape of_neighbours(int h_q, int heads_per_block) {
    return {(h_q + heads_per_block - 1) / heads_per_block, heads_per_block, false};
  }
};

// What every such kernel needs of a problem: a Hopper GPU, a cache in one of `formats`, 32-bit counts.
Status check_split_request(const PlanRequest& request, std::span<const KvFormat> formats);
// What some need besides: queries and outputs in multiples of 16 bytes. Of strides alone, and of addresses as well.
Status check_vector_strides(const DecodeProblem& problem);
Status check_vector_tensors(const DecodeProblem& problem);

// Groups that the device has multiprocessors for; at least one.
std::int32_t num_groups_that_fit(const PlanRequest& request, const GroupShape& shape);

// Rows in parts of equal length, or cut wherever the groups' equal shares end.
inline constexpr std::int32_t kPartsAnywhere = 0;
tile::Schedule make_schedule(const PlanRequest& request, const GroupShape& shape, std::int32_t parts);

// As the request asks. Without a wish: whole rows where those are even among the groups, else kPartsAnywhere.
tile::Schedule make_schedule(const PlanRequest& request, const GroupShape& shape);

struct Cut;         // split_cost.h
struct KernelCost;  // likewise

// What a launch hands to such a kernel.
struct SplitParams {
  DecodeProblem problem;
  tile::Schedule schedule;
  std::int32_t row_bytes;  // of the format, from a row to the next
  float* part_out;         // [schedule.num_slots(), h_q, 512], normalised
  float* part_lse;  // [schedule.num_slots(), h_q], natural log; -infinity: the part is empty and its out unwritten
  // Whether queries and outputs lie in multiples of 16 bytes.
  bool q_is_vectors, out_is_vectors;
  // Whether the kernel lets the merge's thread blocks start as soon as its first warps are done, or only by its last.
  bool merge_starts_early;
};

class SplitPlan : public PlannedDecode {
 public:
  SplitPlan(const PlanRequest& request, const GroupShape& shape);
  // Heads of a thread block, and parts, are those that cost least.
  SplitPlan(const PlanRequest& request, const KernelCost& cost);
  std::size_t workspace_bytes() const final { return out_bytes() + lse_bytes(); }
  std::string describe() const final;
  Status run(const DecodeProblem& problem, void* workspace, void* stream) const final;

 protected:
  // Queues the kernel on `stream` (a cudaStream_t); the plan's device is current.
  virtual Status launch(const SplitParams& params, void* stream) const = 0;

  unsigned num_thread_blocks() const {
    return static_cast<unsigned>(schedule_.num_groups) * static_cast<unsigned>(shape_.blocks_per_group);
  }
  unsigned num_groups() const { return static_cast<unsigned>(schedule_.num_groups); }
  int heads_per_block() const { return shape_.heads_per_block; }
  int h_q() const { return h_q_; }
  std::int32_t device() const { return device_; }

 private:
  SplitPlan(const PlanRequest& request, const Cut& cut);
  std::size_t out_bytes() const;
  std::size_t lse_bytes() const;

  tile::Schedule schedule_;
  GroupShape shape_;
  std::string reason_;  // empty where there was nothing to choose
  std::int32_t device_;
  int h_q_;
  bool is_empty_;
};

}  // namespace chiasma
