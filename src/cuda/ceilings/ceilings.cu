#include "cuda/ceilings/ceilings.h"

#include "cuda/ceilings/probe.cuh"

namespace chiasma::ceilings {
namespace {

__global__ void clock_probe(BlockTime* times) {
  constexpr std::uint64_t kClk = 40000;
  const Stopwatch watch;
  const long long start = clock64();
  while (static_cast<std::uint64_t>(clock64() - start) < kClk) {
  }
  watch.stop(times);
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

double sm_clock_mhz() {
  BlockTime* time = nullptr;
  BlockTime host{};
  if (cudaMalloc(&time, sizeof(BlockTime)) != cudaSuccess) return 0;
  clock_probe<<<1, 32>>>(time);
  const bool ok = cudaMemcpy(&host, time, sizeof host, cudaMemcpyDeviceToHost) == cudaSuccess && host.ns > 0;
  cudaFree(time);
  return ok ? static_cast<double>(host.clk) / static_cast<double>(host.ns) * 1e3 : 0;
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
