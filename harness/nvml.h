// The GPU driver's own meters: power, energy, clocks, and why a clock is held down. NVML is loaded at run time, so that
// nothing links against the driver; where it is missing, why_not() says so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chiasma::harness {

class Nvml {
 public:
  // pci_bus_id: as cudaDeviceGetPCIBusId() writes it. Never fails; without NVML every reading is absent.
  explicit Nvml(const std::string& pci_bus_id);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // Empty where readings are there.
  const std::string& why_not() const { return why_not_; }

  std::string driver_version() const;               // "unknown" without NVML
  std::optional<double> energy_joules() const;      // since the driver was loaded; steps of some 20 to 100 ms
  std::optional<double> watts() const;              // drawn now
  std::optional<double> power_limit_watts() const;  // enforced
  std::optional<double> sm_mhz() const;
  std::optional<double> memory_mhz() const;
  std::optional<double> temperature_celsius() const;
  // Bits of reasons that hold a clock down now, as NVML counts them; 0 without NVML.
  std::uint64_t clock_event_reasons() const;

 private:
  struct Functions;
  std::string why_not_;
  void* library_ = nullptr;
  Functions* functions_ = nullptr;
  void* device_ = nullptr;
};

// Names of the reasons among `bits`, such as "sw_power_cap"; idle is none.
std::vector<std::string> clock_event_names(std::uint64_t bits);

}  // namespace chiasma::harness
