// The device of a command and tensors there. Everything that differs between devices is behind harness::Device.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"
#include "harness/device.h"

namespace chiasma::cli {

inline constexpr const char* kDeviceHelp = "auto (the best there is), cpu, cuda or cuda:N";

// `device` as in kDeviceHelp; with a `kernel`, "auto" means a device that the kernel is for. Throws CommandError: exit
// code 2 for a text that is no device or an unknown kernel, 3 for a device that this build or machine lacks.
std::unique_ptr<harness::Device> open_device(const std::string& device, const std::string& kernel);

// Told of a part of a host tensor that is not needed any more.
using Release = std::function<void(std::span<const std::byte>)>;

// Tensors of one job on a device, released together.
class DeviceTensors {
 public:
  explicit DeviceTensors(harness::Device& device) : device_(device) {}

  // A host tensor as it will be on the device, but for its address: with the device's rules for the pages of a cache.
  chiasma_tensor shape_of(const chiasma_tensor& host) const;
  // A host tensor of that many bytes as the device sees it: the same memory if the device works there, else a copy.
  // `release` is called for each part that has been copied.
  chiasma_tensor input(const chiasma_tensor& host, std::size_t bytes, const Release& release);
  // A contiguous tensor with undefined contents.
  chiasma_tensor output(chiasma_dtype dtype, std::initializer_list<std::int64_t> shape);
  std::byte* scratch(std::size_t bytes);

  // Waits for the device and returns the contents of a tensor that output() made, for as long as this object lives.
  std::span<const std::byte> fetch(const chiasma_tensor& output);

 private:
  void copy(std::byte* to, std::span<const std::byte> from);
  void copy_pages(std::byte* to, std::size_t stride, std::span<const std::byte> from, std::size_t from_stride,
                  const Release& release);

  harness::Device& device_;
  std::vector<harness::DeviceBlock> blocks_;
  std::vector<std::vector<std::byte>> fetched_;
};

}  // namespace chiasma::cli
