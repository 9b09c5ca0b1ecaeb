#include "cuda/ceilings/ceilings.h"

#include "cuda/ceilings/probe.cuh"

namespace chiasma::ceilings {
namespace {

constexpr int kMaxSms = 1024;
constexpr std::size_t kReadingBytes = kMaxSms * sizeof(BlockTime);
// Enough thread blocks that each multiprocessor gets one.
constexpr int kClockBlocks = 2048;

// Both counters of every multiprocessor; they run on between kernels.
__global__ void read_clocks(BlockTime* of_sm) {
  std::uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (sm < kMaxSms) of_sm[sm] = now();
}

}  // namespace

Recorder::Recorder(std::int32_t device) {
  check(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  num_sms_ -= num_sms_ % 2;  // probes of pairs
  check(cudaMalloc(&times_, sizeof(BlockTime) * static_cast<std::size_t>(num_sms_)), "cudaMalloc");
  check(cudaEventCreate(&begin_), "cudaEventCreate");
  check(cudaEventCreate(&end_), "cudaEventCreate");
}

Recorder::~Recorder() {
  cudaFree(times_);
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

void Recorder::raise_shared_limit(const void* kernel, const LaunchShape& shape) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)),
        "cudaFuncSetAttribute");
}

// The blocks' mean time, so that a block that got its work late or early does not decide.
void Recorder::finish_run(Figure* figure, double amount, bool counts) {
  std::vector<BlockTime> times(static_cast<std::size_t>(num_sms_));
  check(cudaMemcpy(times.data(), times_, sizeof(BlockTime) * times.size(), cudaMemcpyDeviceToHost), "running a probe");
  if (!status_.ok() || !counts) return;
  double clk = 0, ns = 0;
  for (const BlockTime& time : times) {
    clk += static_cast<double>(time.clk);
    ns += static_cast<double>(time.ns);
  }
  figure->samples.push_back(amount * static_cast<double>(times.size()) / clk);
  figure->sm_mhz = clk / ns * 1e3;
}

void Recorder::begin_event() {
  check(cudaEventRecord(begin_), "cudaEventRecord");
}

void Recorder::end_event(Figure* figure, double amount, bool counts) {
  check(cudaEventRecord(end_), "cudaEventRecord");
  check(cudaEventSynchronize(end_), "running a probe");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
  if (status_.ok() && counts) figure->samples.push_back(amount / milliseconds * 1e-9);
}

ClockMeter::ClockMeter() {
  for (void*& reading : readings_) {
    if (cudaMalloc(&reading, kReadingBytes) != cudaSuccess) reading = nullptr;
    cudaMemset(reading, 0, kReadingBytes);
  }
}

ClockMeter::~ClockMeter() {
  for (void* reading : readings_) cudaFree(reading);
}

void ClockMeter::start() {
  read_clocks<<<kClockBlocks, 1>>>(static_cast<BlockTime*>(readings_[0]));
}

double ClockMeter::stop_mhz() {
  read_clocks<<<kClockBlocks, 1>>>(static_cast<BlockTime*>(readings_[1]));
  std::vector<BlockTime> first(kMaxSms), last(kMaxSms);
  if (cudaMemcpy(first.data(), readings_[0], kReadingBytes, cudaMemcpyDeviceToHost) != cudaSuccess) return 0;
  if (cudaMemcpy(last.data(), readings_[1], kReadingBytes, cudaMemcpyDeviceToHost) != cudaSuccess) return 0;
  double clk = 0, ns = 0;
  for (int sm = 0; sm < kMaxSms; ++sm) {
    if (first[sm].ns == 0 || last[sm].ns == 0) continue;
    clk += static_cast<double>(last[sm].clk - first[sm].clk);
    ns += static_cast<double>(last[sm].ns - first[sm].ns);
  }
  return ns > 0 ? clk / ns * 1e3 : 0;
}

Status measure(std::int32_t device, std::vector<Figure>* figures) {
  CHIASMA_RETURN_IF_ERROR(gpu::available());
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) {
    return {CHIASMA_DEVICE_UNAVAILABLE,
            concat("the probes are written for compute capability 9.0, device ", device, " has ", major, ".", minor)};
  }
  const gpu::DeviceScope scope(device);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  Recorder recorder(device);
  measure_matrix(recorder);
  measure_convert(recorder);
  measure_shared(recorder);
  measure_exchange(recorder);
  measure_memory(recorder);
  measure_sustained(recorder);
  CHIASMA_RETURN_IF_ERROR(recorder.status());
  *figures = recorder.take();
  return {};
}

}  // namespace chiasma::ceilings
