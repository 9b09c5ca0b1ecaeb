#include "cli/device.h"

#include <charconv>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include "cli/error.h"

namespace chiasma::cli {
namespace {

constexpr std::align_val_t kBufferAlignment{256};

constexpr chiasma_device kCpu{CHIASMA_CPU, 0};

std::vector<chiasma_device> devices_of_kind(chiasma_device_kind kind) {
  std::vector<chiasma_device> devices;
  for (std::int32_t number = 0; number < chiasma_device_count(); ++number) {
    chiasma_device_info info{};
    if (chiasma_device_query(number, &info) == CHIASMA_OK && info.device.kind == kind) devices.push_back(info.device);
  }
  return devices;
}

std::vector<chiasma_device> cuda_devices() {
  check_status(chiasma_cuda_available(), "device cuda");
  return devices_of_kind(CHIASMA_CUDA);
}

std::vector<chiasma_device> all_devices_best_first() {
  std::vector<chiasma_device> devices = devices_of_kind(CHIASMA_CUDA);
  devices.push_back(kCpu);
  return devices;
}

std::vector<chiasma_device> devices_of_kernel(const std::string& kernel) {
  std::string known;
  for (std::int32_t number = 0; number < chiasma_kernel_count(); ++number) {
    chiasma_kernel_info info{};
    check_status(chiasma_kernel_query(number, &info), "kernel");
    if (kernel == info.name) return info.device_kind == CHIASMA_CPU ? std::vector{kCpu} : cuda_devices();
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  fail_input("--kernel {}: there is no such kernel; this build has: {}", kernel, known);
}

std::optional<std::int32_t> parse_index(std::string_view text) {
  std::int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

}  // namespace

std::vector<chiasma_device> select_devices(const std::string& device, const std::string& kernel) {
  if (device == "auto") return kernel.empty() ? all_devices_best_first() : devices_of_kernel(kernel);
  if (device == "cpu") return {kCpu};
  if (device == "cuda") return cuda_devices();
  constexpr std::string_view kCudaPrefix = "cuda:";
  if (device.starts_with(kCudaPrefix)) {
    const auto index = parse_index(std::string_view(device).substr(kCudaPrefix.size()));
    if (index) {
      for (const chiasma_device candidate : cuda_devices()) {
        if (candidate.index == *index) return {candidate};
      }
      throw CommandError(kExitUnavailable,
                         fmt::format("device {}: this machine has {} CUDA device(s)", device, cuda_devices().size()));
    }
  }
  fail_input("--device {}: must be {}", device, kDeviceHelp);
}

std::string device_name(chiasma_device device) {
  return device.kind == CHIASMA_CPU ? "cpu" : fmt::format("cuda:{}", device.index);
}

DeviceBuffer::DeviceBuffer([[maybe_unused]] chiasma_device device, std::size_t bytes)
    : data_(::operator new(bytes, kBufferAlignment)), bytes_(bytes), owned_(true) {}

DeviceBuffer::~DeviceBuffer() {
  if (owned_) ::operator delete(data_, kBufferAlignment);
}

DeviceBuffer DeviceBuffer::with_contents(chiasma_device device, const void* host, std::size_t bytes,
                                         std::size_t alignment) {
  if (reinterpret_cast<std::uintptr_t>(host) % alignment == 0) {
    DeviceBuffer borrowed;
    borrowed.data_ = const_cast<void*>(host);
    borrowed.bytes_ = bytes;
    return borrowed;
  }
  DeviceBuffer copy(device, bytes);
  if (bytes != 0) std::memcpy(copy.data_, host, bytes);
  return copy;
}

void DeviceBuffer::swap(DeviceBuffer& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(owned_, other.owned_);
}

}  // namespace chiasma::cli
