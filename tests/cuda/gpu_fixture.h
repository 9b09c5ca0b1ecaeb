// What the gpu_* programs share. They take their kernels from the registry, and say so where there is no device.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "harness/device.h"
#include "harness/queue.h"
#include "harness/run.h"

namespace chiasma::harness {

// Registry names; {"none"} in builds without CUDA, so that a test by that name can say that it was not run.
std::vector<std::string> cuda_kernels();
std::string name_of_kernel(const testing::TestParamInfo<std::string>& info);

// Bytes of all outputs, guard zones included, as they are now on the host.
std::vector<std::byte> output_bytes(const Workload& workload);

// A case on the device with a queue of its own.
struct Prepared {
  std::unique_ptr<Queue> queue;
  std::unique_ptr<Workload> workload;
  std::unique_ptr<Runner> runner;
  std::vector<DeviceBlock> reference;  // copies of the output regions

  // What the last run left in the outputs becomes what later runs are compared with.
  void keep_reference(Device& device);
  // Queues: outputs made NaN, a run, its differences from the reference counted.
  bool queue_compared_run(RunError* error);
  void queue_poisoned_outputs();
  void queue_comparison();
};

// Device memory with a zone on both sides that has to stay as it is.
class GuardedBlock {
 public:
  // data() is null when there is not enough memory. Every byte is 0xC5.
  GuardedBlock(Device& device, std::size_t bytes);
  std::byte* data() const;
  std::size_t bytes() const { return bytes_; }
  bool guards_intact() const;

 private:
  Device* device_;
  DeviceBlock block_;
  std::size_t bytes_;
};

class GpuTest : public testing::Test {
 protected:
  void SetUp() override;

  // A workload that is ready to run; null after a failure or, with a line on stdout, where the kernel says that it does
  // not do such a case.
  std::unique_ptr<Prepared> prepare(const std::string& line, const std::string& kernel);
  // One run, held against the oracle, which then is the reference.
  void run_reference(Prepared& prepared);
  void expect_no_differences(Queue& queue, const std::string& what);

  std::unique_ptr<Device> device_;
};

// One instance a kernel.
class GpuKernelTest : public GpuTest, public testing::WithParamInterface<std::string> {
 protected:
  // All lines that the kernel does, at least one.
  std::vector<std::unique_ptr<Prepared>> prepare_all(const std::vector<std::string>& lines);
};

}  // namespace chiasma::harness
