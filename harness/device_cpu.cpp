#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "harness/device.h"
#include "harness/parallel.h"

namespace chiasma::harness {
namespace {

constexpr std::size_t kAlignment = 256;
// Larger than the last-level cache of current machines.
constexpr std::size_t kFlushBytes = std::size_t{512} << 20;

// Value of the first line of a /proc file of "key : value" lines whose key is `key`.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (line.rfind(key, 0) == 0 && colon != std::string::npos && colon + 2 < line.size()) return line.substr(colon + 2);
  }
  return "unknown";
}

class CpuDevice final : public Device {
 public:
  chiasma_device id() const override { return {CHIASMA_CPU, 0}; }

  std::vector<std::pair<std::string, std::string>> describe() const override {
    utsname system = {};
    uname(&system);
    chiasma_device_info info = {};
    const bool known = chiasma_device_query(0, &info) == CHIASMA_OK;
    return {{"device", known ? info.name : "cpu"},
            {"cpu", proc_value("/proc/cpuinfo", "model name")},
            {"threads", std::to_string(info.compute_units)},
            {"l3_bytes", std::to_string(sysconf(_SC_LEVEL3_CACHE_SIZE))},
            {"system", std::string(system.sysname) + " " + system.release}};
  }

  std::vector<std::pair<std::string, double>> sensors() const override {
    const std::string mhz = proc_value("/proc/cpuinfo", "cpu MHz");
    if (mhz == "unknown") return {};
    return {{"cpu_mhz", std::strtod(mhz.c_str(), nullptr)}};
  }

  bool shares_host_memory() const override { return true; }

  DeviceBlock allocate(std::size_t bytes) override {
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return DeviceBlock(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded)), std::free);
  }

  bool fill(std::byte* device, int value, std::size_t bytes) override {
    std::memset(device, value, bytes);
    return true;
  }

  bool copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) override {
    std::memcpy(device, host, bytes);
    return true;
  }

  bool copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) override {
    std::memcpy(host, device, bytes);
    return true;
  }

  bool synchronize(std::string* /*error*/) override { return true; }

  void flush_caches() override {
    if (flush_.empty()) flush_.resize(kFlushBytes / sizeof(std::uint64_t));
    // Every core streams through its part, so that private caches lose their contents too.
    parallel_ranges(static_cast<std::int64_t>(flush_.size()), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) ++flush_[static_cast<std::size_t>(n)];
    });
  }

  double time_us(const std::function<void()>& work) override {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  std::vector<std::uint64_t> flush_;
};

}  // namespace

std::unique_ptr<Device> open_cpu_device() {
  return std::make_unique<CpuDevice>();
}

}  // namespace chiasma::harness
