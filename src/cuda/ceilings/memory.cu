// Global memory: streaming, and the gather of 656-byte rows at random places by several methods.
#include <algorithm>

#include "cuda/ceilings/probe.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "format/kv_format.h"

namespace chiasma::ceilings {
namespace {

constexpr int kBlockRows = 64;
constexpr int kRowChunks = v32::kRowBytes / 16;
// A launch reads 1.4 GB, so that few rows are still in L2 when they come up again.
constexpr int kGatherBlocks = 512;
constexpr int kStages = 4;

// Where rows come from. Thread blocks that share a query token (`sharers` neighbours) want the same rows.
struct Pool {
  const std::byte* data;
  std::uint32_t num_rows;
  std::uint32_t sharers;
};

// The rows that one thread block reads: all kBlockRows of every block, or its half of them.
template <int kRows>
struct Rows {
  const Pool& pool;
  std::uint32_t seed;
  std::uint32_t first_row;

  __device__ explicit Rows(const Pool& rows_of)
      : pool(rows_of),
        seed(random_bits(blockIdx.x / pool.sharers)),
        first_row(kRows == kBlockRows ? 0 : blockIdx.x % pool.sharers * kRows) {}
  __device__ const std::byte* row(int block, int index) const {
    const std::uint32_t bits = random_bits(seed + static_cast<std::uint32_t>(block * kBlockRows + index) + first_row);
    return pool.data + std::size_t{__umulhi(bits, pool.num_rows)} * v32::kRowBytes;
  }
  __device__ const std::byte* chunk(int block, int item) const {
    return row(block, item / kRowChunks) + item % kRowChunks * 16;
  }
};

__device__ __forceinline__ uint4 load_16(const std::byte* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Loads into registers, the next block's before this one's are used.
template <int kRows, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) load_gather_probe(const Pool pool, BlockTime* times) {
  constexpr int kItems = kRows * kRowChunks;
  constexpr int kPerThread = (kItems + kThreads - 1) / kThreads;
  const Rows<kRows> rows(pool);
  uint4 values[2][kPerThread] = {};
  const auto load = [&](int block, uint4(&into)[kPerThread]) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int item = i * kThreads + static_cast<int>(threadIdx.x);
      if (item < kItems) into[i] = load_16(rows.chunk(block, item));
    }
  };
  std::uint32_t sum = 0;
  const auto use = [&](const uint4(&loaded)[kPerThread]) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) sum ^= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
  };
  const Stopwatch watch;
  load(0, values[0]);
  for (int block = 0; block < kGatherBlocks; block += 2) {
    load(block + 1, values[1]);
    use(values[0]);
    if (block + 2 < kGatherBlocks) load(block + 2, values[0]);
    use(values[1]);
  }
  keep(sum, times);
  watch.stop(times);
}

// cp.async into a ring; each thread waits for its own copies only.
template <int kRows, int kThreads>
__global__ void __launch_bounds__(kThreads, 1) copy_gather_probe(const Pool pool, BlockTime* times) {
  extern __shared__ std::uint8_t ring[];
  constexpr int kItems = kRows * kRowChunks;
  const Rows<kRows> rows(pool);
  const std::uint32_t shared = ptx::shared_address(ring);
  const Stopwatch watch;
  for (int block = 0; block < kGatherBlocks; ++block) {
    const std::uint32_t stage = shared + block % kStages * kRows * v32::kRowBytes;
    for (int item = static_cast<int>(threadIdx.x); item < kItems; item += kThreads) {
      ptx::copy_async_16(stage + item * 16, rows.chunk(block, item));
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<kStages - 1>();
  }
  ptx::copy_async_wait<0>();
  watch.stop(times);
}

constexpr int kBulkWarps = 4;

// The copy engine, a row an instruction; each warp has barriers of its own.
template <int kRows>
__global__ void __launch_bounds__(kBulkWarps * 32, 1) bulk_gather_probe(const Pool pool, BlockTime* times) {
  extern __shared__ std::uint8_t ring[];
  __shared__ std::uint64_t full[kBulkWarps][kStages];
  constexpr int kWarpRows = kRows / kBulkWarps;
  const Rows<kRows> rows(pool);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp * kWarpRows + lane;
  if (lane == 0) {
    for (std::uint64_t& barrier : full[warp]) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::fence_mbarrier_init();
  }
  const Stopwatch watch;
  for (int block = 0; block < kGatherBlocks + kStages; ++block) {
    const int stage = block % kStages;
    const std::uint32_t barrier = ptx::shared_address(&full[warp][stage]);
    if (block >= kStages) ptx::mbarrier_wait(barrier, (block / kStages - 1) % 2);
    if (block >= kGatherBlocks) continue;
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, kWarpRows * v32::kRowBytes);
    __syncwarp();
    if (lane < kWarpRows) {
      ptx::copy_bulk_from_global(ptx::shared_address(ring) + (stage * kRows + row) * v32::kRowBytes,
                                 rows.row(block, row), v32::kRowBytes, barrier);
    }
  }
  watch.stop(times);
}

__global__ void fill_pool(uint4* pool, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const auto x = static_cast<std::uint32_t>(i) * 4;
    pool[i] = make_uint4(random_operand(x), random_operand(x + 1), random_operand(x + 2), random_operand(x + 3));
  }
}

constexpr int kStreamUnroll = 8;
constexpr int kStreamThreads = 512;

__global__ void read_stream(const uint4* pool, std::size_t count, BlockTime* times) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  std::uint32_t sum = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += stride * kStreamUnroll) {
#pragma unroll
    for (int j = 0; j < kStreamUnroll; ++j) {
      if (i + j * stride < count) {
        const uint4 value = load_16(reinterpret_cast<const std::byte*>(pool + i + j * stride));
        sum ^= value.x ^ value.y ^ value.z ^ value.w;
      }
    }
  }
  keep(sum, times);
}

__global__ void copy_stream(const uint4* from, uint4* to, std::size_t count) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += stride * kStreamUnroll) {
    uint4 values[kStreamUnroll] = {};
#pragma unroll
    for (int j = 0; j < kStreamUnroll; ++j) {
      if (i + j * stride < count) values[j] = load_16(reinterpret_cast<const std::byte*>(from + i + j * stride));
    }
#pragma unroll
    for (int j = 0; j < kStreamUnroll; ++j) {
      if (i + j * stride < count) to[i + j * stride] = values[j];
    }
  }
}

constexpr int kHalfRows = kBlockRows / 2;

// One method, with rows from memory and from L2.
template <typename Kernel>
void measure_gather(Recorder& recorder, const std::byte* pool, std::size_t pool_bytes, const std::string& id,
                    const std::string& what, int rows, std::uint32_t sharers, const LaunchShape& shape, Kernel kernel) {
  constexpr std::size_t kL2PoolBytes = std::size_t{16} << 20;
  const double row_bytes = static_cast<double>(rows) * v32::kRowBytes;
  const double distinct = rows == kBlockRows ? 1.0 / sharers : 1.0;
  for (const bool in_l2 : {false, true}) {
    const std::size_t bytes = in_l2 ? kL2PoolBytes : pool_bytes;
    recorder.measure_per_clk(
        {concat("gather_", id, in_l2 ? "_l2" : "_dram"), concat(what, "; pool of ", bytes >> 20, " MiB"), "B/clk/SM",
         row_bytes, "64 rows", distinct},
        kGatherBlocks * row_bytes, shape, kernel,
        Pool{pool, static_cast<std::uint32_t>(bytes / v32::kRowBytes), sharers});
  }
}

template <int kThreads>
void measure_gathers_by_threads(Recorder& recorder, const std::byte* pool, std::size_t bytes) {
  constexpr std::uint32_t kAllShared = kStages * kBlockRows * v32::kRowBytes;
  const std::string threads = concat(", ", kThreads, " threads");
  const std::string suffix = concat("_t", kThreads);
  measure_gather(recorder, pool, bytes, "load_half" + suffix,
                 "half the rows a thread block, loads prefetched in registers" + threads, kHalfRows, 2, {kThreads},
                 load_gather_probe<kHalfRows, kThreads>);
  measure_gather(recorder, pool, bytes, "copy_half" + suffix,
                 "half the rows a thread block, cp.async, ring of 4" + threads, kHalfRows, 2,
                 {kThreads, kAllShared / 2}, copy_gather_probe<kHalfRows, kThreads>);
  measure_gather(recorder, pool, bytes, "copy_all" + suffix,
                 "all rows in both thread blocks, cp.async, ring of 4" + threads, kBlockRows, 2, {kThreads, kAllShared},
                 copy_gather_probe<kBlockRows, kThreads>);
  measure_gather(recorder, pool, bytes, "copy_own" + suffix,
                 "rows of its own for every thread block, cp.async, ring of 4" + threads, kBlockRows, 1,
                 {kThreads, kAllShared}, copy_gather_probe<kBlockRows, kThreads>);
}

void measure_gathers(Recorder& recorder, const std::byte* pool, std::size_t bytes) {
  constexpr std::uint32_t kAllShared = kStages * kBlockRows * v32::kRowBytes;
  constexpr int kThreads = kBulkWarps * 32;
  measure_gathers_by_threads<128>(recorder, pool, bytes);
  measure_gathers_by_threads<256>(recorder, pool, bytes);
  measure_gather(recorder, pool, bytes, "load_all_t256",
                 "all rows in both thread blocks, loads prefetched in registers, 256 threads", kBlockRows, 2, {256},
                 load_gather_probe<kBlockRows, 256>);
  measure_gather(recorder, pool, bytes, "bulk_half", "half the rows a thread block, cp.async.bulk a row, 4 warps",
                 kHalfRows, 2, {kThreads, kAllShared / 2}, bulk_gather_probe<kHalfRows>);
  measure_gather(recorder, pool, bytes, "bulk_all", "all rows in both thread blocks, cp.async.bulk a row, 4 warps",
                 kBlockRows, 2, {kThreads, kAllShared}, bulk_gather_probe<kBlockRows>);
}

void measure_streams(Recorder& recorder, uint4* pool, std::size_t bytes) {
  const std::size_t count = bytes / sizeof(uint4);
  const auto grid = static_cast<unsigned>(recorder.num_sms() * 4);
  recorder.measure_per_second({"dram_read", "16-byte loads in order", "TB/s"}, static_cast<double>(bytes),
                              [&] { read_stream<<<grid, kStreamThreads>>>(pool, count, recorder.scratch()); });
  recorder.measure_per_second(
      {"dram_copy", "16-byte loads and stores in order, read and written bytes counted", "TB/s"},
      static_cast<double>(bytes), [&] { copy_stream<<<grid, kStreamThreads>>>(pool, pool + count / 2, count / 2); });
}

}  // namespace

void measure_memory(Recorder& recorder) {
  constexpr std::size_t kWantedBytes = std::size_t{5} << 30;
  std::size_t free_bytes = 0, total_bytes = 0;
  recorder.check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  const std::size_t bytes = std::min(kWantedBytes, free_bytes / 2) / 1024 * 1024;
  uint4* pool = nullptr;
  recorder.check(cudaMalloc(&pool, bytes), "allocating a pool of rows");
  if (!recorder.status().ok()) return;
  fill_pool<<<static_cast<unsigned>(recorder.num_sms() * 4), kStreamThreads>>>(pool, bytes / sizeof(uint4));
  measure_gathers(recorder, reinterpret_cast<const std::byte*>(pool), bytes);
  measure_streams(recorder, pool, bytes);
  cudaFree(pool);
}

}  // namespace chiasma::ceilings
