#include "harness/nvml.h"

#include <dlfcn.h>

#include <array>

namespace chiasma::harness {
namespace {

// NVML's own numbers, as its documentation lists them.
constexpr int kSuccess = 0;
constexpr unsigned kClockSm = 1;
constexpr unsigned kClockMemory = 2;
constexpr unsigned kTemperatureGpu = 0;
constexpr unsigned kVersionBytes = 80;

constexpr std::pair<std::uint64_t, const char*> kReasons[] = {{0x2, "applications_clocks_setting"},
                                                              {0x4, "sw_power_cap"},
                                                              {0x8, "hw_slowdown"},
                                                              {0x10, "sync_boost"},
                                                              {0x20, "sw_thermal_slowdown"},
                                                              {0x40, "hw_thermal_slowdown"},
                                                              {0x80, "hw_power_brake_slowdown"},
                                                              {0x100, "display_clock_setting"}};

using DeviceHandle = void*;
template <typename Value>
using Read = int (*)(DeviceHandle, Value*);
using ReadKind = int (*)(DeviceHandle, unsigned, unsigned*);

}  // namespace

struct Nvml::Functions {
  int (*init)();
  int (*shutdown)();
  int (*driver_version)(char*, unsigned);
  int (*device_by_bus_id)(const char*, DeviceHandle*);
  Read<unsigned long long> energy_mj;
  Read<unsigned> power_mw, power_limit_mw;
  ReadKind clock_mhz, temperature;
  Read<unsigned long long> clock_event_reasons;
};

namespace {

template <typename Function>
bool load(void* library, std::initializer_list<const char*> names, Function* function) {
  for (const char* name : names) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    if (*function != nullptr) return true;
  }
  return false;
}

template <typename Value>
std::optional<double> reading(Read<Value> read, void* device, double unit) {
  Value value{};
  if (device == nullptr || read(device, &value) != kSuccess) return std::nullopt;
  return static_cast<double>(value) * unit;
}

std::optional<double> reading(ReadKind read, void* device, unsigned kind) {
  unsigned value = 0;
  if (device == nullptr || read(device, kind, &value) != kSuccess) return std::nullopt;
  return value;
}

}  // namespace

Nvml::Nvml(const std::string& pci_bus_id) {
  constexpr const char* kLibrary = "libnvidia-ml.so.1";
  library_ = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    why_not_ = std::string(kLibrary) + " cannot be loaded";
    return;
  }
  functions_ = new Functions{};
  Functions& f = *functions_;
  const bool complete =
      load(library_, {"nvmlInit_v2"}, &f.init) && load(library_, {"nvmlShutdown"}, &f.shutdown) &&
      load(library_, {"nvmlSystemGetDriverVersion"}, &f.driver_version) &&
      load(library_, {"nvmlDeviceGetHandleByPciBusId_v2"}, &f.device_by_bus_id) &&
      load(library_, {"nvmlDeviceGetTotalEnergyConsumption"}, &f.energy_mj) &&
      load(library_, {"nvmlDeviceGetPowerUsage"}, &f.power_mw) &&
      load(library_, {"nvmlDeviceGetEnforcedPowerLimit"}, &f.power_limit_mw) &&
      load(library_, {"nvmlDeviceGetClockInfo"}, &f.clock_mhz) &&
      load(library_, {"nvmlDeviceGetTemperature"}, &f.temperature) &&
      load(library_, {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"},
           &f.clock_event_reasons);
  if (!complete || f.init() != kSuccess) {
    why_not_ = complete ? "NVML cannot be initialised" : std::string(kLibrary) + " lacks a function";
    return;
  }
  if (f.device_by_bus_id(pci_bus_id.c_str(), &device_) != kSuccess) {
    device_ = nullptr;
    why_not_ = "NVML does not know the device at " + pci_bus_id;
  }
}

Nvml::~Nvml() {
  if (device_ != nullptr) functions_->shutdown();
  delete functions_;
  if (library_ != nullptr) dlclose(library_);
}

std::string Nvml::driver_version() const {
  std::array<char, kVersionBytes> text{};
  if (device_ == nullptr || functions_->driver_version(text.data(), kVersionBytes) != kSuccess) return "unknown";
  return text.data();
}

std::optional<double> Nvml::energy_joules() const {
  return device_ == nullptr ? std::nullopt : reading(functions_->energy_mj, device_, 1e-3);
}
std::optional<double> Nvml::watts() const {
  return device_ == nullptr ? std::nullopt : reading(functions_->power_mw, device_, 1e-3);
}
std::optional<double> Nvml::power_limit_watts() const {
  return device_ == nullptr ? std::nullopt : reading(functions_->power_limit_mw, device_, 1e-3);
}
std::optional<double> Nvml::sm_mhz() const {
  return device_ == nullptr ? std::nullopt : reading(functions_->clock_mhz, device_, kClockSm);
}
std::optional<double> Nvml::memory_mhz() const {
  return device_ == nullptr ? std::nullopt : reading(functions_->clock_mhz, device_, kClockMemory);
}
std::optional<double> Nvml::temperature_celsius() const {
  return device_ == nullptr ? std::nullopt : reading(functions_->temperature, device_, kTemperatureGpu);
}

std::uint64_t Nvml::clock_event_reasons() const {
  unsigned long long bits = 0;
  if (device_ == nullptr || functions_->clock_event_reasons(device_, &bits) != kSuccess) return 0;
  return bits;
}

std::vector<std::string> clock_event_names(std::uint64_t bits) {
  std::vector<std::string> names;
  for (const auto& [bit, name] : kReasons) {
    if ((bits & bit) != 0) names.emplace_back(name);
  }
  return names;
}

}  // namespace chiasma::harness
