// Runs a workload through the public C interface on some device: plan, scratch memory, run, results back to the host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"
#include "harness/device.h"
#include "harness/queue.h"
#include "harness/workload.h"

namespace chiasma::harness {

struct RunOptions {
  std::string kernel;  // empty: automatic
  int num_splits = 0;  // 0: what the case says
  int num_threads = 0;
  Queue* queue = nullptr;  // that launch() uses; null: the default one. Must outlive the runner
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
  // Waits and copies the outputs into the workload; also checks that nothing around the scratch memory was written.
  bool fetch(RunError* error);
  // Puts the inputs of another workload of the same shapes where this one's are on the device, so that addresses stay;
  // fetch() then writes to that one. Not where the device shares host memory.
  bool exchange(Workload& workload, RunError* error);

  Device& device() { return device_; }
  const chiasma_decode_plan* plan() const { return plan_; }
  // As the device sees them.
  const chiasma_decode_args& args() const { return args_; }
  // Device memory of the workload's regions, in their order; empty where the device shares host memory.
  const std::vector<DeviceBlock>& blocks() const { return blocks_; }
  std::byte* workspace() const;
  std::string kernel() const { return chiasma_decode_plan_kernel(plan_); }
  std::string plan_text() const { return chiasma_decode_plan_text(plan_); }
  std::size_t workspace_bytes() const { return chiasma_decode_plan_workspace_bytes(plan_); }

 private:
  Runner(Workload& workload, Device& device, Queue* queue) : workload_(&workload), device_(device), queue_(queue) {}
  bool place_tensors(RunError* error);
  bool place_workspace(RunError* error);
  bool workspace_guards_intact(RunError* error);

  Workload* workload_;
  Device& device_;
  Queue* queue_;
  chiasma_decode_args args_{};
  chiasma_decode_plan* plan_ = nullptr;
  std::vector<DeviceBlock> blocks_;  // one a region; empty when the device shares host memory
  DeviceBlock workspace_;
};

// Resets the outputs, then make, launch and fetch. kernel, if wanted: what the plan chose.
bool run_case(Workload& workload, Device& device, const RunOptions& options, std::string* kernel, RunError* error);

}  // namespace chiasma::harness
