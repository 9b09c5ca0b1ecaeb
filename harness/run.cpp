#include "harness/run.h"

#include <algorithm>
#include <utility>

namespace chiasma::harness {
namespace {

// Before and behind the scratch memory, to see whether a kernel writes past what it asked for. A partial result of 128
// heads has this size, so that one which goes to a wrong place next to the scratch memory is seen.
constexpr std::size_t kWorkspaceGuardBytes = 128 * 512 * sizeof(float);
constexpr int kWorkspacePattern = 0xa5;

void set_error(chiasma_status status, const std::string& message, RunError* error) {
  *error = {status, message};
}

bool from_library(chiasma_status status, RunError* error) {
  if (status == CHIASMA_OK) return true;
  set_error(status, chiasma_last_error(), error);
  return false;
}

}  // namespace

std::unique_ptr<Runner> Runner::make(Workload& workload, Device& device, const RunOptions& options, RunError* error) {
  std::unique_ptr<Runner> runner(new Runner(workload, device, options.queue));
  if (!runner->place_tensors(error)) return nullptr;
  const Case& spec = workload.spec();
  chiasma_plan_options plan_options = {};
  plan_options.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
  plan_options.batch_invariant = spec.invariant ? 1 : 0;
  plan_options.num_splits = options.num_splits != 0 ? options.num_splits : static_cast<int>(spec.splits);
  plan_options.num_threads = options.num_threads;
  if (!from_library(chiasma_decode_plan_create(&runner->args_, &plan_options, &runner->plan_), error)) return nullptr;
  return runner->place_workspace(error) ? std::move(runner) : nullptr;
}

Runner::~Runner() {
  chiasma_decode_plan_destroy(plan_);
}

bool Runner::place_tensors(RunError* error) {
  args_ = workload_->args();
  if (device_.shares_host_memory()) return true;
  for (const Region& region : workload_->regions()) {
    DeviceBlock block = device_.allocate(region.bytes());
    if (block == nullptr || !device_.copy_to_device(block.get(), region.base(), region.bytes())) {
      set_error(CHIASMA_OUT_OF_MEMORY, std::string("no device memory for ") + region.name, error);
      return false;
    }
    chiasma_tensor& tensor = args_.*region.tensor;
    tensor.data = block.get() + (static_cast<std::byte*>(tensor.data) - region.base());
    tensor.device = device_.id();
    blocks_.push_back(std::move(block));
  }
  return true;
}

bool Runner::place_workspace(RunError* error) {
  const std::size_t bytes = kWorkspaceGuardBytes + workspace_bytes() + kWorkspaceGuardBytes;
  workspace_ = device_.allocate(bytes);
  // Scratch memory needs no initialisation, so it starts as rubbish.
  if (workspace_ != nullptr && device_.fill(workspace_.get(), kWorkspacePattern, bytes)) return true;
  set_error(CHIASMA_OUT_OF_MEMORY, "no memory for the scratch memory of " + std::to_string(bytes) + " bytes", error);
  return false;
}

bool Runner::exchange(Workload& workload, RunError* error) {
  for (std::size_t n = 0; n < blocks_.size(); ++n) {
    const Region& region = workload.regions()[n];
    if (region.is_output) continue;
    if (region.bytes() != workload_->regions()[n].bytes() ||
        !device_.copy_to_device(blocks_[n].get(), region.base(), region.bytes())) {
      set_error(CHIASMA_INTERNAL_ERROR, std::string("cannot exchange ") + region.name, error);
      return false;
    }
  }
  workload_ = &workload;
  return true;
}

std::byte* Runner::workspace() const {
  return workspace_.get() + kWorkspaceGuardBytes;
}

bool Runner::launch(RunError* error) {
  void* stream = queue_ == nullptr ? nullptr : queue_->stream();
  return from_library(chiasma_decode_run(plan_, &args_, workspace(), workspace_bytes(), stream), error);
}

bool Runner::fetch(RunError* error) {
  std::string message;
  if (!(queue_ == nullptr ? device_.synchronize(&message) : queue_->synchronize(&message))) {
    set_error(CHIASMA_DEVICE_ERROR, message, error);
    return false;
  }
  for (std::size_t n = 0; n < blocks_.size(); ++n) {
    const Region& region = workload_->regions()[n];
    if (!region.is_output) continue;
    if (!device_.copy_to_host(region.base(), blocks_[n].get(), region.bytes())) {
      set_error(CHIASMA_DEVICE_ERROR, std::string("cannot copy back ") + region.name, error);
      return false;
    }
  }
  return workspace_guards_intact(error);
}

bool Runner::workspace_guards_intact(RunError* error) {
  std::vector<std::byte> guard(kWorkspaceGuardBytes);
  for (const bool behind : {false, true}) {
    const std::byte* place = behind ? workspace() + workspace_bytes() : workspace_.get();
    if (!device_.copy_to_host(guard.data(), place, guard.size())) {
      set_error(CHIASMA_DEVICE_ERROR, "cannot copy back the scratch memory", error);
      return false;
    }
    const auto is_untouched = [](std::byte byte) { return byte == std::byte{kWorkspacePattern}; };
    if (std::all_of(guard.begin(), guard.end(), is_untouched)) continue;
    const char* side = behind ? "past the end" : "before the beginning";
    set_error(CHIASMA_INTERNAL_ERROR, std::string("the kernel wrote ") + side + " of its scratch memory", error);
    return false;
  }
  return true;
}

bool run_case(Workload& workload, Device& device, const RunOptions& options, std::string* kernel, RunError* error) {
  workload.reset_outputs();
  const std::unique_ptr<Runner> runner = Runner::make(workload, device, options, error);
  if (runner == nullptr) return false;
  if (kernel != nullptr) *kernel = runner->kernel();
  return runner->launch(error) && runner->fetch(error);
}

}  // namespace chiasma::harness
