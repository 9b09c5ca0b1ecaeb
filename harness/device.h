// Everything that differs between running on the CPU and on an accelerator: memory, waiting, timing, cache flushing.
// One implementation a kind of device; nothing else in the harness asks where it runs.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chiasma/chiasma.h"
#include "harness/nvml.h"
#include "harness/queue.h"

namespace chiasma::harness {

// Memory of a device, freed with its owner.
using DeviceBlock = std::shared_ptr<std::byte>;

class Device {
 public:
  virtual ~Device() = default;

  virtual chiasma_device id() const = 0;
  // Facts for the head of a result file, such as {"cpu", "..."}, in a fixed order.
  virtual std::vector<std::pair<std::string, std::string>> describe() const = 0;
  // Facts that change while measuring (clock, power, temperature); may be empty.
  virtual std::vector<std::pair<std::string, double>> sensors() const { return {}; }

  // What it draws and how fast its clock runs; null where nothing tells.
  virtual const Nvml* meters() const { return nullptr; }

  // True: kernels read and write the workload's own memory, nothing is copied.
  virtual bool shares_host_memory() const = 0;
  // 256-byte aligned; null when there is not enough.
  virtual DeviceBlock allocate(std::size_t bytes) = 0;
  // These three are done on return.
  virtual bool fill(std::byte* device, int value, std::size_t bytes) = 0;
  virtual bool copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) = 0;
  virtual bool copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) = 0;
  // Waits for queued work; false with the device's message when something failed.
  virtual bool synchronize(std::string* error) = 0;
  // Null where the device knows no queues.
  virtual std::unique_ptr<Queue> open_queue() { return nullptr; }

  // Evicts what the last run left in caches.
  virtual void flush_caches() = 0;
  // Microseconds that work() takes on the device, measured as the device measures best.
  virtual double time_us(const std::function<void()>& work) = 0;
};

// Whether `name` is "auto", "cpu", "cuda" or "cuda:N".
bool is_device_name(std::string_view name);

// Null on failure, with what is wrong in *error.
std::unique_ptr<Device> open_device(std::string_view name, std::string* error);
std::unique_ptr<Device> open_cpu_device();
// Only in builds with CUDA; the device must exist. Its methods may be called from any thread and leave it the calling
// thread's current device.
std::unique_ptr<Device> open_cuda_device(int index);

}  // namespace chiasma::harness
