#include "api/devices.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "api/tensor_check.h"
#include "cpu/decode.h"
#include "cpu/threads.h"
#ifdef CHIASMA_HAS_CUDA
#include "cuda/runtime.h"
#endif

namespace chiasma {
namespace {

std::string cpu_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("model name")) continue;
    const auto colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

void copy_name(const std::string& name, chiasma_device_info* info) {
  const std::size_t length = std::min(name.size(), sizeof(info->name) - 1);
  std::copy_n(name.data(), length, info->name);
  info->name[length] = '\0';
}

chiasma_device_info cpu_info() {
  chiasma_device_info info{};
  info.device = {CHIASMA_CPU, 0};
  copy_name(cpu_name(), &info);
  info.compute_units = cpu::available_threads();
  info.memory_bytes = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  return info;
}

#ifdef CHIASMA_HAS_CUDA
Status query_cuda(std::int32_t index, chiasma_device_info* info) {
  return gpu::query_device(index, info);
}
std::int32_t cuda_count() {
  return gpu::device_count();
}
#else
Status query_cuda(std::int32_t /*index*/, chiasma_device_info* /*info*/) {
  return cuda_available();
}
std::int32_t cuda_count() {
  return 0;
}
#endif

}  // namespace

Status cuda_available() {
#ifdef CHIASMA_HAS_CUDA
  return gpu::available();
#else
  return {CHIASMA_DEVICE_UNAVAILABLE, "this build has no CUDA support; available devices: cpu"};
#endif
}

std::int32_t device_count() {
  return 1 + cuda_count();
}

Status query_device(std::int32_t number, chiasma_device_info* info) {
  if (info == nullptr) return invalid_argument("info is NULL");
  if (number < 0 || number >= device_count()) {
    return invalid_argument("device number is ", number, "; allowed are 0 to ", device_count() - 1);
  }
  if (number > 0) return query_cuda(number - 1, info);
  *info = cpu_info();
  return {};
}

Status query_device(chiasma_device device, chiasma_device_info* info) {
  if (device.kind == CHIASMA_CUDA) return query_cuda(device.index, info);
  if (device.kind != CHIASMA_CPU || device.index != 0) {
    return {CHIASMA_DEVICE_UNAVAILABLE, concat("no device ", device_text(device), " (index ", device.index, ")")};
  }
  *info = cpu_info();
  return {};
}

}  // namespace chiasma
