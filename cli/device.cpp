#include "cli/device.h"

#include <new>

#include "cli/error.h"

namespace chiasma::cli {
namespace {

chiasma_device_kind kind_of_kernel(const std::string& kernel) {
  std::string known;
  for (std::int32_t number = 0; number < chiasma_kernel_count(); ++number) {
    chiasma_kernel_info info{};
    check_status(chiasma_kernel_query(number, &info), "kernel");
    if (kernel == info.name) return info.device_kind;
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  fail_input("--kernel {}: there is no such kernel; this build has: {}", kernel, known);
}

std::size_t contiguous_bytes(const chiasma_tensor& tensor) {
  std::size_t bytes = tensor.dtype == CHIASMA_FLOAT32 || tensor.dtype == CHIASMA_INT32 ? 4 : 2;
  for (std::int32_t axis = 0; axis < tensor.rank; ++axis) bytes *= static_cast<std::size_t>(tensor.shape[axis]);
  return bytes;
}

}  // namespace

std::unique_ptr<harness::Device> open_device(const std::string& device, const std::string& kernel) {
  if (!harness::is_device_name(device)) fail_input("--device {}: must be {}", device, kDeviceHelp);
  std::string name = device;
  if (!kernel.empty()) {
    const chiasma_device_kind kind = kind_of_kernel(kernel);
    if (device == "auto") name = kind == CHIASMA_CPU ? "cpu" : "cuda";
  }
  std::string error;
  std::unique_ptr<harness::Device> opened = harness::open_device(name, &error);
  if (opened == nullptr) throw CommandError(kExitUnavailable, fmt::format("--device {}: {}", device, error));
  return opened;
}

std::byte* DeviceTensors::scratch(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  blocks_.push_back(device_.allocate(bytes));
  if (blocks_.back() == nullptr) throw std::bad_alloc();
  return blocks_.back().get();
}

chiasma_tensor DeviceTensors::input(const chiasma_tensor& host, std::size_t bytes) {
  if (device_.shares_host_memory() || host.rank == 0) return host;
  chiasma_tensor placed = host;
  placed.device = device_.id();
  placed.data = scratch(bytes);
  if (bytes != 0 &&
      !device_.copy_to_device(static_cast<std::byte*>(placed.data), static_cast<const std::byte*>(host.data), bytes)) {
    throw CommandError(kExitUnavailable, fmt::format("copying {} bytes to the device failed", bytes));
  }
  return placed;
}

chiasma_tensor DeviceTensors::output(chiasma_dtype dtype, std::initializer_list<std::int64_t> shape) {
  chiasma_tensor tensor =
      chiasma_contiguous(nullptr, dtype, device_.id(), static_cast<std::int32_t>(shape.size()), shape.begin());
  tensor.data = scratch(contiguous_bytes(tensor));
  return tensor;
}

std::span<const std::byte> DeviceTensors::fetch(const chiasma_tensor& output) {
  std::string error;
  if (!device_.synchronize(&error)) throw CommandError(kExitUnavailable, error);
  const std::size_t bytes = contiguous_bytes(output);
  const auto* data = static_cast<const std::byte*>(output.data);
  if (device_.shares_host_memory() || bytes == 0) return {data, bytes};
  fetched_.emplace_back(bytes);
  if (!device_.copy_to_host(fetched_.back().data(), data, bytes)) {
    throw CommandError(kExitUnavailable, fmt::format("copying {} bytes from the device failed", bytes));
  }
  return fetched_.back();
}

}  // namespace chiasma::cli
