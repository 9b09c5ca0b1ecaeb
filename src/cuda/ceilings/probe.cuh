// What every probe shares: a stopwatch on the device, random inputs, and the launches that turn a kernel into a Figure.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/ceilings/ceilings.h"
#include "cuda/runtime.h"

namespace chiasma::ceilings {

struct BlockTime {
  std::uint64_t clk, ns;
};

__device__ __forceinline__ BlockTime now() {
  BlockTime time;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(time.clk)::"memory");
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time.ns)::"memory");
  return time;
}

// From its construction to stop(), as the whole thread block sees it.
class Stopwatch {
 public:
  __device__ Stopwatch() {
    __syncthreads();
    start_ = now();
  }
  __device__ void stop(BlockTime* times) const {
    __syncthreads();
    const BlockTime end = now();
    if (threadIdx.x == 0) times[blockIdx.x] = {end.clk - start_.clk, end.ns - start_.ns};
  }

 private:
  BlockTime start_;
};

// Keeps the compiler from dropping the work that led to `value`.
__device__ __forceinline__ void keep(std::uint32_t value, BlockTime* times) {
  constexpr std::uint32_t kUnlikely = 0x9e3779b9;
  if (value == kUnlikely) times[blockIdx.x].ns = 0;
}

// A well mixed function of x.
__device__ __forceinline__ std::uint32_t random_bits(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Two f16 or four e4m3 numbers between -2 and 2.
__device__ __forceinline__ std::uint32_t random_operand(std::uint32_t x) {
  return random_bits(x) & 0xbfbfbfbfu;
}

// Fills shared memory; the caller synchronises.
__device__ __forceinline__ void fill_shared(void* memory, std::uint32_t bytes) {
  auto* words = static_cast<std::uint32_t*>(memory);
  for (std::uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = random_operand(blockIdx.x * 65536 + i);
}

// How a probe is launched: one thread block an SM, in clusters if asked for.
struct LaunchShape {
  int threads;
  std::uint32_t shared_bytes = 0;
  int cluster = 1;
};

// Collects figures; after the first failure it does nothing more.
class Recorder {
 public:
  explicit Recorder(std::int32_t device);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  const Status& status() const { return status_; }
  int num_sms() const { return num_sms_; }
  BlockTime* scratch() { return times_; }  // for launches that are not timed by the block
  std::vector<Figure> take() { return std::move(figures_); }

  // Fills in the samples of a rate per clock and SM: each thread block does `amount` of something. The kernel's last
  // parameter is BlockTime*.
  template <typename... Parameters, typename... Arguments>
  void measure_per_clk(Figure figure, double amount, const LaunchShape& shape, void (*kernel)(Parameters...),
                       Arguments... arguments) {
    raise_shared_limit(reinterpret_cast<const void*>(kernel), shape);
    for (int run = 0; run <= kRuns && status_.ok(); ++run) {
      launch(shape, kernel, arguments..., times_);
      finish_run(&figure, amount, run > 0);
    }
    if (status_.ok()) figures_.push_back(std::move(figure));
  }

  // The same for a rate of the whole device by the clock on the wall: work() does `amount` of something.
  template <typename Work>
  void measure_per_second(Figure figure, double amount, Work&& work) {
    ClockMeter meter;
    meter.start();
    for (int run = 0; run <= kRuns && status_.ok(); ++run) {
      begin_event();
      work();
      end_event(&figure, amount, run > 0);
    }
    figure.sm_mhz = meter.stop_mhz();
    if (status_.ok()) figures_.push_back(std::move(figure));
  }

  void check(cudaError_t error, const char* operation) {
    if (status_.ok()) static_cast<void>(status_ = gpu::to_status(error, operation));
  }

 private:
  static constexpr int kRuns = 11;

  template <typename... Parameters, typename... Arguments>
  void launch(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(num_sms_));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = shape.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a probe");
  }

  void raise_shared_limit(const void* kernel, const LaunchShape& shape);
  void finish_run(Figure* figure, double amount, bool counts);
  void begin_event();
  void end_event(Figure* figure, double amount, bool counts);

  Status status_;
  int num_sms_ = 0;
  BlockTime* times_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::vector<Figure> figures_;
};

// One file a resource.
void measure_matrix(Recorder& recorder);
void measure_convert(Recorder& recorder);
void measure_shared(Recorder& recorder);
void measure_exchange(Recorder& recorder);
void measure_memory(Recorder& recorder);
void measure_sustained(Recorder& recorder);  // last, since the chip stays slower for a while

}  // namespace chiasma::ceilings
