// translate_indices: tokens of requests to slots. A thread block takes a stretch of some rows of indices, one after the
// other, with the request's row of the block table in shared memory where that pays.
#include "cuda/cache/rows.cuh"
#include "cuda/tile/divider.h"
#include "format/translate_token.h"

namespace chiasma::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kEntriesPerThread = 8;
constexpr int kEntriesPerBlock = kThreads * kEntriesPerThread;
// Some more than fit at once; each has some rows, so that it loads a request's table once for all of them.
constexpr std::int64_t kMostTranslateBlocks = 132 * 8 * 4;

enum class Table { none, in_memory, in_shared };

struct Params {
  TranslateProblem problem;
  tile::Divider by_page, by_interleave, by_world;
  std::int64_t rows_per_block;
  // What the quick way asks, as 32 bits.
  std::uint32_t page_size, world, rank, interleave;
  std::uint32_t last_page;   // of a request's table, or as far as an index of 31 bits reaches
  std::uint32_t last_entry;  // the last page of the pool whose first slot 31 bits hold
  bool whole_vectors;        // every row of indices and slots begins at a multiple of 16 bytes
};

// table: of the request, with a page or more.
__device__ __forceinline__ std::int32_t translate(const TranslateProblem& problem, std::int64_t index,
                                                  const std::int32_t* table) {
  const std::int64_t token = own_token({problem.cp_world, problem.cp_rank, problem.cp_interleave}, index);
  if (token < 0) return kNoSlot;
  const Divided by_page = divided(token, problem.page_size);
  return by_page.quotient < problem.max_pages ? slot_in_page(table[by_page.quotient], problem.page_size, by_page.rest)
                                              : kNoSlot;
}

// The same for an index that 31 bits hold or that is negative. PERF: without branches, so that eight look-ups are on
// their way at once; what is looked up for an entry that is not there is thrown away.
template <bool kDealtOut>
__device__ __forceinline__ std::int32_t translate_small(const Params& params, std::int32_t index,
                                                        const std::int32_t* table) {
  auto token = static_cast<std::uint32_t>(index);
  bool is_there = index >= 0;
  if constexpr (kDealtOut) {
    const std::uint32_t run = params.by_interleave.divide(token);
    const std::uint32_t round = params.by_world.divide(run);
    is_there = is_there && run - round * params.world == params.rank;
    token = round * params.interleave + (token - run * params.interleave);
  }
  const std::uint32_t page = params.by_page.divide(token);
  is_there = is_there && page <= params.last_page;
  const auto entry = static_cast<std::uint32_t>(table[min(page, params.last_page)]);
  // Below 2^32 for an entry in range: its first slot and the offset are each below 2^31.
  const std::uint32_t slot = entry * params.page_size + (token - page * params.page_size);
  is_there = is_there && entry <= params.last_entry && slot <= kMostSlot;
  return is_there ? static_cast<std::int32_t>(slot) : kNoSlot;
}

template <Table kTable, bool kDealtOut>
__device__ __forceinline__ std::int32_t translate_quickly(const Params& params, std::int64_t index,
                                                          const std::int32_t* table) {
  if constexpr (kTable == Table::none) return slot_or_none(index);
  return translate_small<kDealtOut>(params, index < 0 ? -1 : static_cast<std::int32_t>(index), table);
}

// A thread's part of a whole stretch: four neighbours in every 4 * kThreads.
template <typename Index>
struct Entries {
  static constexpr int kVectors = kEntriesPerThread / 4;
  Index index[kVectors][4];

  static __device__ __forceinline__ int first_of(int vector) {
    return (vector * kThreads + static_cast<int>(threadIdx.x)) * 4;
  }

  __device__ __forceinline__ void load(const Index* stretch) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const Index* from = stretch + first_of(n);
      Index* to = index[n];
      if constexpr (sizeof(Index) == 4) {
        const int4 four = __ldcs(reinterpret_cast<const int4*>(from));
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      } else {
        const longlong2 low = __ldcs(reinterpret_cast<const longlong2*>(from));
        const longlong2 high = __ldcs(reinterpret_cast<const longlong2*>(from + 2));
        to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
      }
    }
  }
  // from: where the entries were loaded.
  template <Table kTable, bool kDealtOut>
  __device__ __forceinline__ void store_slots(const Params& params, const std::int32_t* table, const Index* from,
                                              std::int32_t* stretch) const {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const Index* own = index[n];
      if (sizeof(Index) == 8 && kTable != Table::none && max(max(own[0], own[1]), max(own[2], own[3])) > kMostSlot) {
        // Rare, and read again, since registers have no addresses.
#pragma unroll 1
        for (int at = first_of(n); at < first_of(n) + 4; ++at) {
          stretch[at] = translate(params.problem, from[at], table);
        }
        continue;
      }
      const auto slot = [&](int i) { return translate_quickly<kTable, kDealtOut>(params, own[i], table); };
      __stcs(reinterpret_cast<int4*>(stretch + first_of(n)), make_int4(slot(0), slot(1), slot(2), slot(3)));
    }
  }
  static __device__ __forceinline__ void store_none(std::int32_t* stretch) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      *reinterpret_cast<int4*>(stretch + first_of(n)) = make_int4(kNoSlot, kNoSlot, kNoSlot, kNoSlot);
    }
  }
};

// A stretch of one row of indices, and of its slots.
template <typename Index>
struct Stretch {
  const Index* indices;
  std::int32_t* slots;
  std::int64_t request;  // -1: none that has pages

  __device__ Stretch(const TranslateProblem& problem, std::int64_t row, std::int64_t begin, bool asks_request) {
    const Divided at = divided(row, problem.s_q);
    indices = static_cast<const Index*>(problem.indices) + at.quotient * problem.indices_stride_b +
              at.rest * problem.indices_stride_s + begin;
    slots = problem.slots + at.quotient * problem.slots_stride_b + at.rest * problem.slots_stride_s + begin;
    request = -1;
    if (!asks_request || problem.max_pages == 0) return;
    const std::int64_t given =
        problem.request == nullptr ? at.quotient : __ldg(problem.request + at.quotient * problem.request_stride);
    if (given >= 0 && given < problem.requests) request = given;
  }
};

template <typename Index, Table kTable, bool kDealtOut, bool kIsWhole>
__device__ __forceinline__ void translate_stretches(const Params& params, std::int64_t begin, std::int64_t length,
                                                    std::int32_t* shared_table) {
  const TranslateProblem& problem = params.problem;
  constexpr bool kHasTable = kTable != Table::none;
  const std::int64_t first = blockIdx.y * params.rows_per_block;
  const std::int64_t num_rows = problem.b * problem.s_q;
  const std::int64_t last = first + params.rows_per_block < num_rows ? first + params.rows_per_block : num_rows;
  if (first >= last) return;
  // PERF: the next row's entries and its request are on their way while a row is worked on.
  Stretch<Index> next(problem, first, begin, kHasTable);
  Entries<Index> next_entries;
  if (kIsWhole) next_entries.load(next.indices);
  std::int64_t held = -1;  // the request whose table shared memory holds
  for (std::int64_t row = first; row < last; ++row) {
    const Stretch<Index> own = next;
    const Entries<Index> entries = next_entries;
    if (row + 1 < last) {
      next = Stretch<Index>(problem, row + 1, begin, kHasTable);
      if (kIsWhole) next_entries.load(next.indices);
    }
    if (kHasTable && own.request < 0) {
      if (kIsWhole) Entries<Index>::store_none(own.slots);
      for (std::int64_t at = threadIdx.x; !kIsWhole && at < length; at += kThreads) own.slots[at] = kNoSlot;
      continue;
    }
    const std::int32_t* table = kHasTable ? problem.block_table + own.request * problem.block_table_stride : nullptr;
    if constexpr (kTable == Table::in_shared) {
      if (own.request != held) {
        __syncthreads();
        for (std::int64_t page = threadIdx.x; page < problem.max_pages; page += kThreads) {
          shared_table[page] = __ldg(table + page);
        }
        __syncthreads();
        held = own.request;
      }
      table = shared_table;
    }
    if constexpr (kIsWhole) {
      entries.template store_slots<kTable, kDealtOut>(params, table, own.indices, own.slots);
    } else {
      for (std::int64_t at = threadIdx.x; at < length; at += kThreads) {
        own.slots[at] = kHasTable ? translate(problem, own.indices[at], table) : slot_or_none(own.indices[at]);
      }
    }
  }
}

template <typename Index, Table kTable, bool kDealtOut>
__global__ void __launch_bounds__(kThreads) translate_kernel(const __grid_constant__ Params params) {
  extern __shared__ std::int32_t shared_table[];
  const std::int64_t topk = params.problem.topk;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kEntriesPerBlock;
  const std::int64_t length = topk - begin < kEntriesPerBlock ? topk - begin : kEntriesPerBlock;
  if (params.whole_vectors && length == kEntriesPerBlock) {
    translate_stretches<Index, kTable, kDealtOut, true>(params, begin, length, shared_table);
  } else {
    translate_stretches<Index, kTable, kDealtOut, false>(params, begin, length, shared_table);
  }
}

bool has_whole_vectors(const TranslateProblem& problem) {
  const std::int64_t per_vector = problem.indices_are_int64 ? 2 : 4;
  return is_multiple_of_16(problem.indices) && is_multiple_of_16(problem.slots) &&
         problem.indices_stride_b % per_vector == 0 && problem.indices_stride_s % per_vector == 0 &&
         problem.slots_stride_b % 4 == 0 && problem.slots_stride_s % 4 == 0;
}

// Beyond 2^31 no index of 31 bits tells a difference.
std::uint32_t at_most_2_31(std::int64_t number) {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(number, 0, std::int64_t{1} << 31));
}

tile::Divider divider_of(std::int64_t divisor) {
  return tile::Divider::make(std::max(at_most_2_31(divisor), 1u));
}

struct Launch {
  dim3 grid;
  std::size_t shared_bytes;
  cudaStream_t stream;
};

template <typename Index>
void launch(const Params& params, Table table, const Launch& how) {
  const auto run = [&]<Table kTable, bool kDealtOut>() {
    translate_kernel<Index, kTable, kDealtOut><<<how.grid, kThreads, how.shared_bytes, how.stream>>>(params);
  };
  const bool is_dealt_out = params.problem.cp_world != 1;
  if (table == Table::none) return run.template operator()<Table::none, false>();
  if (table == Table::in_memory) {
    return is_dealt_out ? run.template operator()<Table::in_memory, true>()
                        : run.template operator()<Table::in_memory, false>();
  }
  is_dealt_out ? run.template operator()<Table::in_shared, true>() : run.template operator()<Table::in_shared, false>();
}

}  // namespace

Status translate_indices(const TranslateProblem& problem, const Place& place) {
  if (problem.b * problem.s_q == 0 || problem.topk == 0) return {};
  const DeviceScope scope(place.device);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  const std::int64_t num_rows = problem.b * problem.s_q;
  const std::int64_t stretches = (problem.topk + kEntriesPerBlock - 1) / kEntriesPerBlock;
  const std::int64_t row_blocks = std::clamp<std::int64_t>(kMostTranslateBlocks / stretches, 1, num_rows);
  const Params params{problem,
                      divider_of(problem.page_size),
                      divider_of(problem.cp_interleave),
                      divider_of(problem.cp_world),
                      (num_rows + row_blocks - 1) / row_blocks,
                      at_most_2_31(problem.page_size),
                      at_most_2_31(problem.cp_world),
                      at_most_2_31(problem.cp_rank),
                      at_most_2_31(problem.cp_interleave),
                      at_most_2_31(problem.max_pages - 1),
                      static_cast<std::uint32_t>(kMostSlot / std::max<std::int64_t>(problem.page_size, 1)),
                      has_whole_vectors(problem)};
  // Loading a table pays where many entries ask it.
  const bool in_shared = problem.max_pages <= std::min<std::int64_t>(problem.topk, kEntriesPerBlock);
  const Table table = problem.block_table == nullptr ? Table::none : in_shared ? Table::in_shared : Table::in_memory;
  const Launch how{{static_cast<unsigned>(stretches), static_cast<unsigned>(row_blocks)},
                   table == Table::in_shared ? static_cast<std::size_t>(problem.max_pages) * sizeof(std::int32_t) : 0,
                   static_cast<cudaStream_t>(place.stream)};
  problem.indices_are_int64 ? launch<std::int64_t>(params, table, how) : launch<std::int32_t>(params, table, how);
  return launched("launching the translate kernel");
}

}  // namespace chiasma::gpu
