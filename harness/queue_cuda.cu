#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "harness/queue.h"
#include "harness/queue_cuda.h"

namespace chiasma::harness {
namespace {

using Counter = unsigned long long;

__global__ void count_words(const uint4* a, const uint4* b, std::size_t num_vectors, const unsigned* tail_a,
                            const unsigned* tail_b, unsigned num_tail, Counter* total) {
  unsigned count = 0;
  const std::size_t first = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  for (std::size_t i = first; i < num_vectors; i += std::size_t{gridDim.x} * blockDim.x) {
    const uint4 left = a[i];
    const uint4 right = b[i];
    count += (left.x != right.x) + (left.y != right.y) + (left.z != right.z) + (left.w != right.w);
  }
  if (first < num_tail) count += tail_a[first] != tail_b[first];
  if (count != 0) atomicAdd(total, Counter{count});
}

class CudaRecording final : public Recording {
 public:
  explicit CudaRecording(cudaGraphExec_t graph) : graph_(graph) {}
  ~CudaRecording() override { cudaGraphExecDestroy(graph_); }
  cudaGraphExec_t graph() const { return graph_; }

 private:
  cudaGraphExec_t graph_;
};

class CudaQueue final : public Queue {
 public:
  explicit CudaQueue(int device) : device_(device) {
    cudaSetDevice(device_);
    note(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    note(cudaMalloc(&differences_, sizeof(Counter)));
    note(cudaMemsetAsync(differences_, 0, sizeof(Counter), stream_));
  }
  ~CudaQueue() override {
    release();
    cudaStreamSynchronize(stream_);
    cudaFree(differences_);
    cudaStreamDestroy(stream_);
  }

  void* stream() const override { return stream_; }

  void fill(std::byte* to, int value, std::size_t bytes) override { note(cudaMemsetAsync(to, value, bytes, stream_)); }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    note(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  }

  void count_differences(const std::byte* a, const std::byte* b, std::size_t bytes) override {
    constexpr std::size_t kThreads = 256, kMaxBlocks = 1024, kWordBytes = 4;
    const std::size_t num_vectors = bytes / sizeof(uint4);
    const std::size_t tail = num_vectors * sizeof(uint4);
    const std::size_t blocks = std::min(kMaxBlocks, num_vectors / kThreads + 1);
    cudaSetDevice(device_);
    count_words<<<static_cast<unsigned>(blocks), kThreads, 0, stream_>>>(
        reinterpret_cast<const uint4*>(a), reinterpret_cast<const uint4*>(b), num_vectors,
        reinterpret_cast<const unsigned*>(a + tail), reinterpret_cast<const unsigned*>(b + tail),
        static_cast<unsigned>((bytes - tail) / kWordBytes), differences_);
    note(cudaGetLastError());
  }

  void hold() override {
    held_.store(true);
    note(cudaLaunchHostFunc(
        stream_, [](void* held) { static_cast<std::atomic<bool>*>(held)->wait(true); }, &held_));
  }
  void release() override {
    held_.store(false);
    held_.notify_all();
  }

  std::unique_ptr<Recording> record(const std::function<bool()>& work, std::string* error) override {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    note(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    const bool queued = work();
    note(cudaStreamEndCapture(stream_, &graph));
    if (queued && graph != nullptr) note(cudaGraphInstantiate(&executable, graph, 0));
    if (graph != nullptr) cudaGraphDestroy(graph);
    std::string message;
    const bool sound = synchronize(&message);
    if (!queued || !sound || executable == nullptr) {
      *error = sound ? "the work could not be queued while recording" : message;
      return nullptr;
    }
    return std::make_unique<CudaRecording>(executable);
  }

  void replay(const Recording& recording) override {
    note(cudaGraphLaunch(static_cast<const CudaRecording&>(recording).graph(), stream_));
  }

  bool synchronize(std::string* error) override {
    note(cudaStreamSynchronize(stream_));
    const cudaError_t failure = std::exchange(failure_, cudaSuccess);
    if (failure != cudaSuccess) *error = std::string("the device reports: ") + cudaGetErrorString(failure);
    return failure == cudaSuccess;
  }

  std::int64_t take_differences(std::string* error) override {
    Counter count = 0;
    note(cudaMemcpyAsync(&count, differences_, sizeof count, cudaMemcpyDeviceToHost, stream_));
    note(cudaMemsetAsync(differences_, 0, sizeof count, stream_));
    return synchronize(error) ? static_cast<std::int64_t>(count) : -1;
  }

 private:
  void note(cudaError_t status) {
    if (status != cudaSuccess && failure_ == cudaSuccess) failure_ = status;
  }

  int device_;
  cudaStream_t stream_ = nullptr;
  Counter* differences_ = nullptr;
  cudaError_t failure_ = cudaSuccess;
  std::atomic<bool> held_ = false;
};

}  // namespace

std::unique_ptr<Queue> open_cuda_queue(int device) {
  return std::make_unique<CudaQueue>(device);
}

}  // namespace chiasma::harness
