// Shared memory, 16 bytes a lane without bank conflicts.
#include "cuda/ceilings/probe.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace chiasma::ceilings {
namespace {

constexpr std::uint32_t kSharedBytes = 64 * 1024;
constexpr int kUnroll = 8;
constexpr int kRounds = 256;

__global__ void load_probe(BlockTime* times) {
  extern __shared__ uint4 memory[];
  fill_shared(memory, kSharedBytes);
  uint4 sum = {};
  const Stopwatch watch;
  for (int round = 0; round < kRounds; ++round) {
    const int base = round % 4 * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint4 value = memory[base + 32 * i];
      sum = make_uint4(sum.x ^ value.x, sum.y ^ value.y, sum.z ^ value.z, sum.w ^ value.w);
    }
  }
  keep(sum.x ^ sum.y ^ sum.z ^ sum.w, times);
  watch.stop(times);
}

__global__ void store_probe(BlockTime* times) {
  extern __shared__ uint4 memory[];
  const std::uint32_t bits = random_operand(threadIdx.x);
  const std::uint32_t address = ptx::shared_address(memory) + threadIdx.x * sizeof(uint4);
  const Stopwatch watch;
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address + 512 * i), "r"(bits), "r"(bits + i),
                   "r"(bits + round), "r"(~bits)
                   : "memory");
    }
  }
  watch.stop(times);
}

}  // namespace

void measure_shared(Recorder& recorder) {
  for (const int warps : {4, 8, 12}) {
    const int threads = warps * 32;
    const double bytes = static_cast<double>(threads) * kRounds * kUnroll * sizeof(uint4);
    recorder.measure_per_clk({concat("shared_load_w", warps), concat("ld.shared.v4, ", warps, " warps"), "B/clk/SM"},
                             bytes, {threads, kSharedBytes}, load_probe);
    recorder.measure_per_clk({concat("shared_store_w", warps), concat("st.shared.v4, ", warps, " warps"), "B/clk/SM"},
                             bytes, {threads, kSharedBytes}, store_probe);
  }
}

}  // namespace chiasma::ceilings
