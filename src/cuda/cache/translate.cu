// translate_indices: tokens of requests to slots. A thread block takes a stretch of one row of indices, with the
// request's row of the block table in shared memory where that pays.
#include "cuda/cache/rows.cuh"
#include "cuda/tile/divider.h"
#include "format/translate_token.h"

namespace chiasma::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kEntriesPerThread = 8;
constexpr int kEntriesPerBlock = kThreads * kEntriesPerThread;
constexpr std::int64_t kMostPagesInShared = 4096;

struct Params {
  TranslateProblem problem;
  tile::Divider by_page, by_interleave, by_world;
  bool table_in_shared;
};

// Like own_token(), for what 31 bits hold.
__device__ __forceinline__ std::int32_t own_small_token(const Params& params, std::uint32_t token) {
  const TranslateProblem& problem = params.problem;
  if (problem.cp_world == 1) return static_cast<std::int32_t>(token);
  const std::uint32_t run = params.by_interleave.divide(token);
  const std::uint32_t round = params.by_world.divide(run);
  if (run - round * static_cast<std::uint32_t>(problem.cp_world) != static_cast<std::uint32_t>(problem.cp_rank)) {
    return -1;
  }
  const auto interleave = static_cast<std::uint32_t>(problem.cp_interleave);
  return static_cast<std::int32_t>(round * interleave + (token - run * interleave));
}

// table: of the request, in global or shared memory; null: it has none.
__device__ __forceinline__ std::int32_t translate(const Params& params, std::int64_t index, const std::int32_t* table) {
  const TranslateProblem& problem = params.problem;
  if (problem.block_table == nullptr) return slot_or_none(index);
  if (table == nullptr || index < 0) return kNoSlot;
  std::int64_t page, offset;
  if (index <= kMostSlot) {
    const std::int32_t token = own_small_token(params, static_cast<std::uint32_t>(index));
    if (token < 0) return kNoSlot;
    page = params.by_page.divide(static_cast<std::uint32_t>(token));
    offset = token - page * problem.page_size;
  } else {
    const std::int64_t token = own_token({problem.cp_world, problem.cp_rank, problem.cp_interleave}, index);
    if (token < 0) return kNoSlot;
    page = token / problem.page_size;
    offset = token % problem.page_size;
  }
  return page < problem.max_pages ? slot_in_page(table[page], problem.page_size, offset) : kNoSlot;
}

template <typename Index>
__device__ __forceinline__ void translate_stretch(const Params& params, const Index* indices, std::int32_t* slots,
                                                  std::int64_t begin, std::int64_t end, const std::int32_t* table) {
  // Four at a time where a thread's are whole vectors of both.
  const bool is_aligned =
      (reinterpret_cast<std::uintptr_t>(indices + begin) | reinterpret_cast<std::uintptr_t>(slots + begin)) % 16 == 0;
  if (is_aligned && end - begin == kEntriesPerBlock) {
#pragma unroll
    for (int n = 0; n < kEntriesPerThread / 4; ++n) {
      const std::int64_t at = begin + (n * kThreads + threadIdx.x) * 4;
      Index index[4];
      if constexpr (sizeof(Index) == 4) {
        const int4 four = *reinterpret_cast<const int4*>(indices + at);
        index[0] = four.x, index[1] = four.y, index[2] = four.z, index[3] = four.w;
      } else {
        const longlong2 first = *reinterpret_cast<const longlong2*>(indices + at);
        const longlong2 second = *reinterpret_cast<const longlong2*>(indices + at + 2);
        index[0] = first.x, index[1] = first.y, index[2] = second.x, index[3] = second.y;
      }
      *reinterpret_cast<int4*>(slots + at) =
          make_int4(translate(params, index[0], table), translate(params, index[1], table),
                    translate(params, index[2], table), translate(params, index[3], table));
    }
    return;
  }
  for (std::int64_t at = begin + threadIdx.x; at < end; at += kThreads)
    slots[at] = translate(params, indices[at], table);
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) translate_kernel(const __grid_constant__ Params params) {
  extern __shared__ std::int32_t shared_table[];
  const TranslateProblem& problem = params.problem;
  const std::int64_t num_rows = problem.b * problem.s_q;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kEntriesPerBlock;
  const std::int64_t end = begin + kEntriesPerBlock < problem.topk ? begin + kEntriesPerBlock : problem.topk;
  for (std::int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    const std::int64_t i = row / problem.s_q;
    const std::int64_t s = row - i * problem.s_q;
    const std::int32_t* table = nullptr;
    if (problem.block_table != nullptr) {
      const std::int64_t request = problem.request == nullptr ? i : __ldg(problem.request + i * problem.request_stride);
      if (request >= 0 && request < problem.requests)
        table = problem.block_table + request * problem.block_table_stride;
    }
    if (params.table_in_shared) {
      __syncthreads();
      for (std::int64_t page = threadIdx.x; table != nullptr && page < problem.max_pages; page += kThreads) {
        shared_table[page] = __ldg(table + page);
      }
      __syncthreads();
      if (table != nullptr) table = shared_table;
    }
    translate_stretch(
        params,
        static_cast<const Index*>(problem.indices) + i * problem.indices_stride_b + s * problem.indices_stride_s,
        problem.slots + i * problem.slots_stride_b + s * problem.slots_stride_s, begin, end, table);
  }
}

tile::Divider divider_of(std::int64_t divisor) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  return tile::Divider::make(static_cast<std::uint32_t>(std::clamp<std::int64_t>(divisor, 1, kMost)));
}

}  // namespace

Status translate_indices(const TranslateProblem& problem, const Place& place) {
  if (problem.b * problem.s_q == 0 || problem.topk == 0) return {};
  const DeviceScope scope(place.device);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  // Loading a table pays where many entries ask it.
  const bool table_in_shared = problem.block_table != nullptr && problem.max_pages <= kMostPagesInShared &&
                               problem.max_pages <= std::min<std::int64_t>(problem.topk, kEntriesPerBlock);
  const Params params{problem, divider_of(problem.page_size), divider_of(problem.cp_interleave),
                      divider_of(problem.cp_world), table_in_shared};
  constexpr std::int64_t kMostGridY = 65535;
  const dim3 grid(static_cast<unsigned>((problem.topk + kEntriesPerBlock - 1) / kEntriesPerBlock),
                  static_cast<unsigned>(std::min(problem.b * problem.s_q, kMostGridY)));
  const std::size_t shared = table_in_shared ? static_cast<std::size_t>(problem.max_pages) * sizeof(std::int32_t) : 0;
  const auto stream = static_cast<cudaStream_t>(place.stream);
  if (problem.indices_are_int64) {
    translate_kernel<std::int64_t><<<grid, kThreads, shared, stream>>>(params);
  } else {
    translate_kernel<std::int32_t><<<grid, kThreads, shared, stream>>>(params);
  }
  return launched("launching the translate kernel");
}

}  // namespace chiasma::gpu
