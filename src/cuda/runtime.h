// The CUDA runtime behind the library's Status: every call's error becomes a code and a message. Host code only; no
// CUDA header is needed to include this.
#pragma once

#include <cstdint>

#include "api/status.h"

namespace chiasma::gpu {

// OK, or why there is no usable device.
Status available();
std::int32_t device_count();
Status query_device(std::int32_t index, chiasma_device_info* info);

// Makes a device current for the calling thread and puts the previous one back.
class DeviceScope {
 public:
  explicit DeviceScope(std::int32_t index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;
  bool switched_ = false;
  Status status_;
};

// error is a cudaError_t.
Status to_status(int error, const char* operation);

}  // namespace chiasma::gpu
