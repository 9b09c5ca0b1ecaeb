// What the kernels over rows of a cache share: a warp a row, 16 columns a lane.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "api/problem.h"
#include "cuda/cache/launch.h"
#include "cuda/runtime.h"
#include "format/numbers.h"

namespace chiasma::gpu {

inline constexpr int kWarp = 32;
inline constexpr int kWarpsPerBlock = 8;
inline constexpr int kLaneColumns = 16;
inline constexpr int kMainColumns = kWarp * kLaneColumns;  // 512; the rest of a row belongs to its first lanes

// PERF: more thread blocks than fit at once, each of which strides over rows, so that no warp waits for the last.
inline constexpr std::int64_t kMostBlocks = 132 * 8 * 16;

inline unsigned blocks_for_rows(std::int64_t rows) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((rows + kWarpsPerBlock - 1) / kWarpsPerBlock, 1, kMostBlocks));
}

__device__ __forceinline__ std::int64_t first_row() {
  return std::int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
}
__device__ __forceinline__ std::int64_t row_stride() {
  return std::int64_t{gridDim.x} * kWarpsPerBlock;
}

// Where a slot's bytes are.
struct RowPlace {
  std::int64_t row;     // bytes from the pool's start
  std::int64_t scales;  // likewise, where there are any
};

struct Divided {
  std::int64_t quotient, rest;
};
// Of numbers >= 0. PERF: a division of 64 bits takes a hundred instructions and more, so it is left to numbers that
// need it.
__device__ __forceinline__ Divided divided(std::int64_t number, std::int64_t divisor) {
  if ((number | divisor) <= 0x7fffffff) {
    const auto small = static_cast<std::uint32_t>(number), by = static_cast<std::uint32_t>(divisor);
    return {small / by, small % by};
  }
  const std::int64_t quotient = number / divisor;
  return {quotient, number - quotient * divisor};
}

// A token's place in a paged cache.
struct PagedToken {
  std::int64_t page, offset;
};
__device__ __forceinline__ PagedToken paged_token(std::int64_t token, std::int64_t page_size) {
  const Divided by_page = divided(token, page_size);
  return {by_page.quotient, by_page.rest};
}

template <KvFormat kFormat>
__device__ __forceinline__ RowPlace place_of(const KvPool& pool, const PagedToken& token) {
  constexpr RowTraits kTraits = traits_of(kFormat);
  const std::int64_t begin = token.page * pool.page_stride_bytes;
  const std::int64_t row = begin + token.offset * kTraits.row_bytes;
  const std::int64_t scales =
      kTraits.has_scale_plane() ? begin + plane_offset(kFormat, pool.page_size, token.offset) : row;
  return {row, scales + kTraits.scales_offset};
}

inline bool is_multiple_of_16(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

// Calls visit with the format as a template argument.
template <typename Visit>
Status for_format(KvFormat format, Visit&& visit) {
  switch (format) {
    case KvFormat::v32: return visit.template operator()<KvFormat::v32>();
    case KvFormat::v4: return visit.template operator()<KvFormat::v4>();
    case KvFormat::bf16: return visit.template operator()<KvFormat::bf16>();
    case KvFormat::v41: return visit.template operator()<KvFormat::v41>();
    case KvFormat::v41plane: return visit.template operator()<KvFormat::v41plane>();
    case KvFormat::v32nope: return visit.template operator()<KvFormat::v32nope>();
    case KvFormat::v32nope_compact: return visit.template operator()<KvFormat::v32nope_compact>();
    case KvFormat::fp8: return visit.template operator()<KvFormat::fp8>();
    case KvFormat::fp8nope: return visit.template operator()<KvFormat::fp8nope>();
    case KvFormat::bf16nope: return visit.template operator()<KvFormat::bf16nope>();
  }
  return {CHIASMA_INTERNAL_ERROR, "a format without a kernel"};
}

inline Status launched(const char* what) {
  const cudaError_t error = cudaGetLastError();
  return to_status(error, what);
}

}  // namespace chiasma::gpu
