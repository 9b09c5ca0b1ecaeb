#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "harness/device.h"
#include "harness/queue_cuda.h"

namespace chiasma::harness {
namespace {

// More than twice the L2 of current devices.
constexpr std::size_t kFlushBytes = std::size_t{256} << 20;

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : index_(index), meters_(pci_bus_id(index)) {
    cudaSetDevice(index);
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
  }
  ~CudaDevice() override {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  chiasma_device id() const override { return {CHIASMA_CUDA, index_}; }

  std::vector<std::pair<std::string, std::string>> describe() const override {
    cudaDeviceProp properties = {};
    int driver = 0, runtime = 0;
    cudaGetDeviceProperties(&properties, index_);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    return {{"device", properties.name},
            {"multiprocessors", std::to_string(properties.multiProcessorCount)},
            {"l2_bytes", std::to_string(properties.l2CacheSize)},
            {"driver", meters_.driver_version()},
            {"cuda_driver_api", version_text(driver)},
            {"cuda_runtime", version_text(runtime)}};
  }

  // Of one moment: a clock soon falls once the work is done. What the driver does not tell is left out.
  std::vector<std::pair<std::string, double>> sensors() const override {
    const std::pair<const char*, std::optional<double>> all[] = {{"sm_mhz", meters_.sm_mhz()},
                                                                 {"memory_mhz", meters_.memory_mhz()},
                                                                 {"power_w", meters_.watts()},
                                                                 {"power_limit_w", meters_.power_limit_watts()},
                                                                 {"temperature_c", meters_.temperature_celsius()}};
    std::vector<std::pair<std::string, double>> readings;
    for (const auto& [name, value] : all) {
      if (value) readings.emplace_back(name, *value);
    }
    return readings;
  }

  const Nvml* meters() const override { return &meters_; }

  bool shares_host_memory() const override { return false; }

  DeviceBlock allocate(std::size_t bytes) override {
    void* memory = nullptr;
    cudaSetDevice(index_);
    if (cudaMalloc(&memory, bytes == 0 ? 1 : bytes) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return DeviceBlock(static_cast<std::byte*>(memory), [](std::byte* block) { cudaFree(block); });
  }

  bool fill(std::byte* device, int value, std::size_t bytes) override {
    cudaSetDevice(index_);
    return cudaMemset(device, value, bytes) == cudaSuccess && finish_copy();
  }

  bool copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) override {
    cudaSetDevice(index_);
    return cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice) == cudaSuccess && finish_copy();
  }

  bool copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) override {
    cudaSetDevice(index_);
    return cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
  }

  bool synchronize(std::string* error) override {
    cudaSetDevice(index_);
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) *error = std::string("the device reports: ") + cudaGetErrorString(status);
    return status == cudaSuccess;
  }

  std::unique_ptr<Queue> open_queue() override { return open_cuda_queue(index_); }

  void flush_caches() override {
    if (flush_ == nullptr) flush_ = allocate(kFlushBytes);
    if (flush_ != nullptr) cudaMemsetAsync(flush_.get(), 0, kFlushBytes);
  }

  double time_us(const std::function<void()>& work) override {
    cudaEventRecord(begin_);
    work();
    cudaEventRecord(end_);
    cudaEventSynchronize(end_);
    float milliseconds = 0.0f;
    cudaEventElapsedTime(&milliseconds, begin_, end_);
    return milliseconds * 1e3;
  }

 private:
  // A copy from pageable memory may return while its last part is on the way, and queues do not wait for the default
  // stream.
  static bool finish_copy() { return cudaStreamSynchronize(nullptr) == cudaSuccess; }

  static std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  }

  static std::string pci_bus_id(int index) {
    constexpr int kLength = 32;
    char text[kLength] = {};
    if (cudaDeviceGetPCIBusId(text, kLength, index) != cudaSuccess) cudaGetLastError();
    return text;
  }

  int index_;
  Nvml meters_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  DeviceBlock flush_;
};

}  // namespace

std::unique_ptr<Device> open_cuda_device(int index) {
  return std::make_unique<CudaDevice>(index);
}

}  // namespace chiasma::harness
