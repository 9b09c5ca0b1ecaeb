// Runs a workload through the public C interface on some device: plan, scratch memory, run, results back to the host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"
#include "harness/device.h"
#include "harness/workload.h"

namespace chiasma::harness {

struct RunOptions {
  std::string kernel;  // empty: automatic
  int num_splits = 0;  // 0: what the case says
  int num_threads = 0;
};

// A failure of the C interface: its status and message.
struct RunError {
  chiasma_status status = CHIASMA_OK;
  std::string message;
};

// A workload prepared on a device, to be run any number of times. The workload and the device must outlive it.
class Runner {
 public:
  // Null on failure.
  static std::unique_ptr<Runner> make(Workload& workload, Device& device, const RunOptions& options, RunError* error);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Queues one decode; on the CPU it is done on return.
  bool launch(RunError* error);
  // Waits and copies the outputs into the workload; also checks that the scratch memory's end was respected.
  bool fetch(RunError* error);

  Device& device() { return device_; }
  std::string kernel() const { return chiasma_decode_plan_kernel(plan_); }
  std::string plan_text() const { return chiasma_decode_plan_text(plan_); }
  std::size_t workspace_bytes() const { return chiasma_decode_plan_workspace_bytes(plan_); }

 private:
  Runner(Workload& workload, Device& device) : workload_(workload), device_(device) {}
  bool place_tensors(RunError* error);

  Workload& workload_;
  Device& device_;
  chiasma_decode_args args_{};
  chiasma_decode_plan* plan_ = nullptr;
  std::vector<DeviceBlock> blocks_;  // one a region; empty when the device shares host memory
  DeviceBlock workspace_;
};

// Resets the outputs, then make, launch and fetch. kernel, if wanted: what the plan chose.
bool run_case(Workload& workload, Device& device, const RunOptions& options, std::string* kernel, RunError* error);

}  // namespace chiasma::harness
