// Distributed shared memory: what two blocks of a cluster can send each other, both at once.
#include "cuda/ceilings/probe.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"

namespace chiasma::ceilings {
namespace {

constexpr std::uint32_t kBufferBytes = 36 * 1024;  // half a tile of 64 x 576 numbers of 16 bits
constexpr int kRepeats = 16;                       // of the buffer; one phase of a barrier counts up to 2^20 bytes
constexpr std::uint32_t kTotalBytes = kRepeats * kBufferBytes;
static_assert(kTotalBytes < (1u << 20));
constexpr std::uint32_t kSharedBytes = 2 * kBufferBytes;

// What both probes do around their copies: a barrier that counts all that the peer sends.
template <typename Send>
__device__ __forceinline__ void exchange(BlockTime* times, Send&& send) {
  extern __shared__ uint4 memory[];
  __shared__ std::uint64_t arrived;
  fill_shared(memory, kSharedBytes);
  const std::uint32_t barrier = ptx::shared_address(&arrived);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, kTotalBytes);
  }
  ptx::fence_proxy_async();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  const std::uint32_t peer = ptx::cluster_block_rank() ^ 1u;
  const std::uint32_t from = ptx::shared_address(memory);
  const Stopwatch watch;
  send(from, ptx::map_to_peer(from + kBufferBytes, peer), ptx::map_to_peer(barrier, peer));
  ptx::mbarrier_wait(barrier, 0);
  watch.stop(times);
  // The peer's memory must outlive the copies into it.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

// The copy engine, `bytes` an instruction, from the first `lanes` lanes of every warp.
__global__ void bulk_probe(std::uint32_t bytes, std::uint32_t lanes, BlockTime* times) {
  exchange(times, [bytes, lanes](std::uint32_t from, std::uint32_t to, std::uint32_t barrier) {
    const std::uint32_t lane = threadIdx.x % 32;
    if (lane >= lanes) return;
    const std::uint32_t stride = blockDim.x / 32 * lanes * bytes;
    for (std::uint32_t at = (threadIdx.x / 32 * lanes + lane) * bytes; at < kTotalBytes; at += stride) {
      ptx::copy_bulk_to_peer(to + at % kBufferBytes, from + at % kBufferBytes, bytes, barrier);
    }
  });
}

// 16 bytes a lane straight from registers.
__global__ void store_async_probe(BlockTime* times) {
  exchange(times, [](std::uint32_t, std::uint32_t to, std::uint32_t barrier) {
    const std::uint32_t bits = random_operand(threadIdx.x);
    std::uint32_t offset = threadIdx.x * sizeof(uint4);
    for (std::uint32_t at = offset; at < kTotalBytes; at += blockDim.x * sizeof(uint4)) {
      ptx::store_async_16(to + offset, make_uint4(bits, bits + at, ~bits, bits ^ at), barrier);
      offset += blockDim.x * static_cast<std::uint32_t>(sizeof(uint4));
      if (offset >= kBufferBytes) offset -= kBufferBytes;
    }
  });
}

constexpr int kCluster = 2;
constexpr const char* kBothWays = "; to the peer and from it at once, B/clk each way";

}  // namespace

void measure_exchange(Recorder& recorder) {
  struct Bulk {
    std::uint32_t bytes;
    int warps;
    std::uint32_t lanes;
  };
  for (const auto& [bytes, warps, lanes] :
       {Bulk{128, 8, 8}, {256, 4, 1}, {256, 8, 8}, {512, 8, 8}, {1024, 4, 1}, {1024, 8, 8}, {4096, 4, 1}}) {
    recorder.measure_per_clk({concat("dsm_bulk_", bytes, "_w", warps, "_l", lanes),
                              concat("cp.async.bulk of ", bytes, " bytes, ", warps, " warps, ", lanes,
                                     lanes == 1 ? " lane each" : " lanes each", kBothWays),
                              "B/clk/SM", kBufferBytes, "36 KB"},
                             kTotalBytes, {warps * 32, kSharedBytes, kCluster}, bulk_probe, bytes, lanes);
  }
  for (const int warps : {4, 8}) {
    recorder.measure_per_clk(
        {concat("dsm_st_async_w", warps), concat("st.async of 16 bytes, ", warps, " warps", kBothWays), "B/clk/SM",
         kBufferBytes, "36 KB"},
        kTotalBytes, {warps * 32, kSharedBytes, kCluster}, store_async_probe);
  }
}

}  // namespace chiasma::ceilings
