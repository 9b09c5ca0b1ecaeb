// The decode kernels of this build. One entry a kernel: what it is called, what it can do, how it plans and runs.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "api/problem.h"
#include "api/status.h"

namespace chiasma {

// Of the scratch memory that callers bring.
inline constexpr std::size_t kWorkspaceAlignment = 256;

struct PlanRequest {
  const DecodeProblem& problem;  // addresses are not valid here: only shapes, strides, formats and presence are
  chiasma_device_info device;
  bool batch_invariant;
  int num_splits;   // 0: automatic
  int num_threads;  // 0: automatic
};

// A schedule that is ready to run. Immutable.
class PlannedDecode {
 public:
  PlannedDecode() = default;
  PlannedDecode(const PlannedDecode&) = delete;
  PlannedDecode& operator=(const PlannedDecode&) = delete;
  virtual ~PlannedDecode() = default;

  virtual std::size_t workspace_bytes() const = 0;
  // Lines that say how the work is cut and why.
  virtual std::string describe() const = 0;
  virtual Status run(const DecodeProblem& problem, void* workspace, void* stream) const = 0;
};

struct Kernel {
  chiasma_kernel_info info;
  // OK, or what this kernel lacks for the request. Pure.
  Status (*check)(const PlanRequest& request);
  // Whether this kernel is a good choice for a request that check() accepts; null: always. Only automatic choice asks.
  bool (*suits)(const PlanRequest& request);
  // Called only after check() said OK. Pure.
  std::unique_ptr<PlannedDecode> (*plan)(const PlanRequest& request);
  // Microseconds by the kernel's cost model, or null. Only automatic choice asks, and not where the batch must not
  // matter.
  double (*estimate_us)(const PlanRequest& request) = nullptr;
};

// In order of preference: the first of the right device kind that suits is chosen, else the first whose check() passes.
// If that one has an estimate, a later one that suits and is estimated to be faster takes its place.
std::span<const Kernel> registered_kernels();
// Null if there is none of that name.
const Kernel* find_kernel(const char* name);
std::string kernel_names(chiasma_device_kind kind);

}  // namespace chiasma
