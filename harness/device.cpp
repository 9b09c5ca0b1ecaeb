#include "harness/device.h"

#include <charconv>

namespace chiasma::harness {
namespace {

constexpr std::string_view kCudaPrefix = "cuda:";

// Index of "cuda" (0) or "cuda:N"; -1 for anything else.
int cuda_index(std::string_view name) {
  if (name == "cuda") return 0;
  if (!name.starts_with(kCudaPrefix)) return -1;
  int index = -1;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kCudaPrefix.size(), end, index);
  return error == std::errc() && stop == end ? index : -1;
}

int count_cuda_devices() {
  int count = 0;
  for (int number = 0; number < chiasma_device_count(); ++number) {
    chiasma_device_info info;
    if (chiasma_device_query(number, &info) == CHIASMA_OK && info.device.kind == CHIASMA_CUDA) ++count;
  }
  return count;
}

}  // namespace

bool is_device_name(std::string_view name) {
  return name == "auto" || name == "cpu" || cuda_index(name) >= 0;
}

std::unique_ptr<Device> open_device(std::string_view name, std::string* error) {
  if (name == "cpu") return open_cpu_device();
  const int index = name == "auto" ? 0 : cuda_index(name);
  if (index < 0) {
    *error = "device is '" + std::string(name) + "', but must be auto, cpu, cuda or cuda:N";
    return nullptr;
  }
  const bool has_cuda = chiasma_cuda_available() == CHIASMA_OK;
  if (name == "auto" && !has_cuda) return open_cpu_device();
  if (!has_cuda) {
    *error = chiasma_last_error();
    return nullptr;
  }
  if (index >= count_cuda_devices()) {
    *error = "device is '" + std::string(name) + "', but this machine has " + std::to_string(count_cuda_devices()) +
             " CUDA device(s)";
    return nullptr;
  }
#ifdef CHIASMA_HAS_CUDA
  return open_cuda_device(index);
#else
  return nullptr;  // not reached: without CUDA in the build none is available
#endif
}

}  // namespace chiasma::harness
