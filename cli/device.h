// Which device a command works on, and memory there. The only place of the command line that treats devices
// differently.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"

namespace chiasma::cli {

// Help text of every --device option.
inline constexpr const char* kDeviceHelp = "auto (the best there is), cpu, cuda or cuda:N";

// The devices that "auto", "cpu", "cuda" or "cuda:N" allows, best first; never empty. With `kernel` given, "auto" means
// the devices of that kernel's kind. Throws CommandError: exit code 2 for text that is none of these or an unknown
// kernel, 3 for a device that this build or machine lacks.
std::vector<chiasma_device> select_devices(const std::string& device, const std::string& kernel);

// "cpu" or "cuda:N".
std::string device_name(chiasma_device device);

// Memory on a device, 256-byte aligned, released with the object.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Uninitialised memory. Throws std::bad_alloc.
  DeviceBuffer(chiasma_device device, std::size_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer();

  // The same bytes on `device`. On the CPU, memory that is aligned to `alignment` is borrowed, not copied: `host` must
  // then outlive the buffer, and must not be written through it.
  static DeviceBuffer with_contents(chiasma_device device, const void* host, std::size_t bytes, std::size_t alignment);

  void* data() const { return data_; }
  // The contents where the host can read them, once all work that writes them is done.
  const void* on_host() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(DeviceBuffer& other) noexcept;

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool owned_ = false;
};

}  // namespace chiasma::cli
