#include "api/devices.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "api/tensor_check.h"
#include "cpu/decode.h"

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

}  // namespace

Status cuda_available() {
  return {CHIASMA_DEVICE_UNAVAILABLE, "this build has no CUDA support; available devices: cpu"};
}

std::int32_t device_count() {
  return 1;
}

Status query_device(std::int32_t number, chiasma_device_info* info) {
  if (info == nullptr) return invalid_argument("info is NULL");
  if (number < 0 || number >= device_count()) {
    return invalid_argument("device number is ", number, "; allowed are 0 to ", device_count() - 1);
  }
  *info = cpu_info();
  return {};
}

Status query_device(chiasma_device device, chiasma_device_info* info) {
  if (device.kind == CHIASMA_CUDA) {
    CHIASMA_RETURN_IF_ERROR(cuda_available());
  }
  if (device.kind != CHIASMA_CPU || device.index != 0) {
    return {CHIASMA_DEVICE_UNAVAILABLE, concat("no device ", device_text(device), " (index ", device.index, ")")};
  }
  *info = cpu_info();
  return {};
}

}  // namespace chiasma
