#include "harness/device.h"

#include <charconv>

namespace chiasma::harness {
namespace {

constexpr std::string_view kCudaPrefix = "cuda:";

bool is_cuda_name(std::string_view name) {
  if (name == "cuda") return true;
  if (!name.starts_with(kCudaPrefix)) return false;
  int index = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kCudaPrefix.size(), end, index);
  return error == std::errc() && stop == end && index >= 0;
}

}  // namespace

bool is_device_name(std::string_view name) {
  return name == "auto" || name == "cpu" || is_cuda_name(name);
}

std::unique_ptr<Device> open_device(std::string_view name, std::string* error) {
  if (name == "auto" || name == "cpu") return open_cpu_device();
  if (!is_cuda_name(name)) {
    *error = "device is '" + std::string(name) + "', but must be auto, cpu, cuda or cuda:N";
  } else if (chiasma_cuda_available() != CHIASMA_OK) {
    *error = chiasma_last_error();
  } else {
    *error = "device is '" + std::string(name) + "', but verify and bench run on the CPU only so far";
  }
  return nullptr;
}

}  // namespace chiasma::harness
