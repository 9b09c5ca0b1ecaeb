// gather_dequantize and dequantize: stored rows to float32 or bf16 rows, a warp a row.
#include <cuda_fp16.h>

#include "cuda/cache/rows.cuh"
#include "cuda/ptx/convert.cuh"

namespace chiasma::gpu {
namespace {

// Rows are moved in vectors of as many columns as 16 bytes of kv hold. Lane l takes every 32nd from the l-th on, so
// that a warp's loads and its stores are each one stretch of memory.
template <bool kToBf16>
struct Vector {
  static constexpr int kColumns = kToBf16 ? 8 : 4;

  // As stored: kColumns codes with their scale, or kColumns bf16.
  uint4 bits;
  float scale;
  bool is_codes;
};

template <KvFormat kFormat>
__device__ __forceinline__ float scale_of(const KvPool& pool, const std::byte* scales, int column) {
  constexpr RowTraits kTraits = traits_of(kFormat);
  if constexpr (kTraits.scale_type == ScaleType::cache) {
    return pool.scale;
  } else if constexpr (kTraits.scale_type == ScaleType::ue8m0) {
    return ue8m0_to_float(__ldg(reinterpret_cast<const std::uint8_t*>(scales) + column / kTraits.scale_columns));
  } else {
    return __ldg(reinterpret_cast<const float*>(scales) + column / kTraits.scale_columns);
  }
}

// kBytes: 4, 8 or 16, of which the pointer is a multiple.
template <int kBytes>
__device__ __forceinline__ uint4 load_bytes(const std::byte* from) {
  if constexpr (kBytes == 16) return __ldg(reinterpret_cast<const uint4*>(from));
  if constexpr (kBytes == 8) {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
    return make_uint4(words.x, words.y, 0, 0);
  }
  return make_uint4(__ldg(reinterpret_cast<const std::uint32_t*>(from)), 0, 0, 0);
}

template <KvFormat kFormat, bool kToBf16>
__device__ __forceinline__ Vector<kToBf16> load_vector(const KvPool& pool, const RowPlace& place, int column) {
  constexpr RowTraits kTraits = traits_of(kFormat);
  constexpr int kColumns = Vector<kToBf16>::kColumns;
  const std::byte* row = pool.data + place.row;
  if constexpr (kTraits.is_quantized()) {
    if (kTraits.bf16_columns == 0 || column < kTraits.code_columns) {
      return {load_bytes<kColumns>(row + column), scale_of<kFormat>(pool, pool.data + place.scales, column), true};
    }
  }
  return {load_bytes<2 * kColumns>(row + kTraits.bf16_offset + 2 * (column - kTraits.code_columns)), 1.0f, false};
}

// Four codes times their scale. Codes are exact in f16, and so are f16 in float32: the product is what is rounded.
__device__ __forceinline__ float4 dequantized(std::uint32_t codes, float scale) {
  std::uint32_t low, high;
  ptx::e4m3x4_to_half2x2(codes, low, high);
  const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&low));
  const float2 second = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return make_float4(__fmul_rn(first.x, scale), __fmul_rn(first.y, scale), __fmul_rn(second.x, scale),
                     __fmul_rn(second.y, scale));
}

__device__ __forceinline__ bool has_nan(const float4& numbers) {
  return isnan(numbers.x) || isnan(numbers.y) || isnan(numbers.z) || isnan(numbers.w);
}

__device__ __forceinline__ std::uint32_t bf16_pair(float low, float high) {
  return to_bf16(low).bits | static_cast<std::uint32_t>(to_bf16(high).bits) << 16;
}

// Two words of bf16. PERF: the instruction rounds as to_bf16() does, but makes another NaN.
__device__ __forceinline__ uint2 rounded(const float4& numbers) {
  if (has_nan(numbers)) {
    return make_uint2(bf16_pair(with_one_nan(numbers.x), with_one_nan(numbers.y)),
                      bf16_pair(with_one_nan(numbers.z), with_one_nan(numbers.w)));
  }
  return make_uint2(ptx::pack_bf162(numbers.x, numbers.y), ptx::pack_bf162(numbers.z, numbers.w));
}

// 16 bytes of kv.
__device__ __forceinline__ uint4 words_of(const Vector<true>& vector) {
  if (!vector.is_codes) return vector.bits;
  const uint2 first = rounded(dequantized(vector.bits.x, vector.scale));
  const uint2 second = rounded(dequantized(vector.bits.y, vector.scale));
  return make_uint4(first.x, first.y, second.x, second.y);
}
__device__ __forceinline__ uint4 words_of(const Vector<false>& vector) {
  const uint4& bits = vector.bits;
  if (!vector.is_codes) return make_uint4(bits.x << 16, bits.x & 0xffff0000u, bits.y << 16, bits.y & 0xffff0000u);
  const float4 numbers = dequantized(bits.x, vector.scale);
  return make_uint4(__float_as_uint(with_one_nan(numbers.x)), __float_as_uint(with_one_nan(numbers.y)),
                    __float_as_uint(with_one_nan(numbers.z)), __float_as_uint(with_one_nan(numbers.w)));
}

template <bool kToBf16, bool kAligned>
__device__ __forceinline__ void store_words(const uint4& words, void* kv, std::int64_t element) {
  constexpr int kBytes = kToBf16 ? 2 : 4;
  auto* to = static_cast<std::byte*>(kv) + element * kBytes;
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = words;
  } else {
    const std::uint32_t all[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kToBf16) {
        reinterpret_cast<std::uint16_t*>(to)[2 * i] = static_cast<std::uint16_t>(all[i]);
        reinterpret_cast<std::uint16_t*>(to)[2 * i + 1] = static_cast<std::uint16_t>(all[i] >> 16);
      } else {
        reinterpret_cast<std::uint32_t*>(to)[i] = all[i];
      }
    }
  }
}

// element: of kv, where the row begins. Without a place the row becomes zeros.
template <KvFormat kFormat, bool kToBf16, bool kAligned>
__device__ __forceinline__ void copy_row(const KvPool& pool, bool exists, const RowPlace& place, void* kv,
                                         std::int64_t element, int lane) {
  constexpr int kColumns = Vector<kToBf16>::kColumns;
  constexpr int kVectors = traits_of(kFormat).key_dim() / kColumns;
  constexpr int kOfLane = (kVectors + kWarp - 1) / kWarp;
  const auto column_of = [&](int i) { return (i * kWarp + lane) * kColumns; };
  const auto is_there = [&](int i) { return (i + 1) * kWarp <= kVectors || i * kWarp + lane < kVectors; };
  // PERF: all loads are on their way before the first is waited for.
  Vector<kToBf16> vectors[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    vectors[i] = {make_uint4(0, 0, 0, 0), 0.0f, false};
    if (exists && is_there(i)) vectors[i] = load_vector<kFormat, kToBf16>(pool, place, column_of(i));
  }
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (is_there(i)) store_words<kToBf16, kAligned>(words_of(vectors[i]), kv, element + column_of(i));
  }
}

__device__ __forceinline__ std::int64_t load_integer(const IntegerView& view, std::int64_t index) {
  if (view.is_int64) return __ldg(static_cast<const std::int64_t*>(view.data) + index * view.stride);
  return __ldg(static_cast<const std::int32_t*>(view.data) + index * view.stride);
}

// Row i from slot slots[i].
template <KvFormat kFormat, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    gather_slots_kernel(const __grid_constant__ GatherProblem problem) {
  const KvPool& pool = problem.cache;
  const auto slot_of = [&](std::int64_t row) { return row < problem.rows ? load_integer(problem.slots, row) : -1; };
  // PERF: a row's slot is on its way while the row before is worked on.
  std::int64_t next = slot_of(first_row());
  for (std::int64_t row = first_row(); row < problem.rows; row += row_stride()) {
    const std::int64_t slot = next;
    next = slot_of(row + row_stride());
    const bool exists = slot >= 0 && slot < pool.num_slots();
    const RowPlace place = exists ? place_of<kFormat>(pool, paged_token(slot, pool.page_size)) : RowPlace{};
    copy_row<kFormat, kToBf16, kAligned>(pool, exists, place, problem.kv, row * problem.kv_stride, threadIdx.x % kWarp);
  }
}

// Tokens of request blockIdx.y and on.
template <KvFormat kFormat, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    gather_pages_kernel(const __grid_constant__ GatherProblem problem) {
  const KvPool& pool = problem.cache;
  for (std::int64_t request = blockIdx.y; request < problem.b; request += gridDim.y) {
    const std::int64_t most = problem.max_pages * pool.page_size;
    const std::int64_t given = __ldg(problem.seq_lens + request * problem.seq_lens_stride);
    const std::int64_t length = given < 0 ? 0 : given < most ? given : most;
    const std::int64_t start = load_integer(problem.starts, request);
    if (start >= problem.rows || start <= -length) continue;
    const std::int64_t last = length < problem.rows - start ? length : problem.rows - start;
    for (std::int64_t token = (start < 0 ? -start : 0) + first_row(); token < last; token += row_stride()) {
      const PagedToken entry = paged_token(token, pool.page_size);
      const std::int64_t page = __ldg(problem.block_table + request * problem.block_table_stride + entry.page);
      const bool exists = page >= 0 && page < pool.num_pages;
      const RowPlace place = exists ? place_of<kFormat>(pool, PagedToken{page, entry.offset}) : RowPlace{};
      copy_row<kFormat, kToBf16, kAligned>(pool, exists, place, problem.kv, (start + token) * problem.kv_stride,
                                           threadIdx.x % kWarp);
    }
  }
}

template <KvFormat kFormat, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    dequantize_kernel(const __grid_constant__ DequantizeProblem problem) {
  const KvPool& pool = problem.cache;
  for (std::int64_t slot = first_row(); slot < pool.num_slots(); slot += row_stride()) {
    const PagedToken token = paged_token(slot, pool.page_size);
    copy_row<kFormat, kToBf16, kAligned>(pool, true, place_of<kFormat>(pool, token), problem.kv,
                                         token.page * problem.kv_stride_page + token.offset * problem.kv_stride_token,
                                         threadIdx.x % kWarp);
  }
}

constexpr int kThreads = kWarp * kWarpsPerBlock;

template <KvFormat kFormat, bool kToBf16, bool kAligned>
void launch(const GatherProblem& problem, cudaStream_t stream) {
  if (problem.slots.data != nullptr) {
    gather_slots_kernel<kFormat, kToBf16, kAligned><<<blocks_for_rows(problem.rows), kThreads, 0, stream>>>(problem);
    return;
  }
  constexpr std::int64_t kMostGridY = 65535;
  const auto requests = static_cast<unsigned>(std::min(problem.b, kMostGridY));
  // One request may have all rows; many share the device.
  const std::int64_t most = std::min(problem.rows, problem.max_pages * problem.cache.page_size);
  const unsigned blocks = std::min(blocks_for_rows(most), std::max(16u, static_cast<unsigned>(kMostBlocks) / requests));
  gather_pages_kernel<kFormat, kToBf16, kAligned><<<dim3(blocks, requests), kThreads, 0, stream>>>(problem);
}

template <KvFormat kFormat, bool kToBf16, bool kAligned>
void launch(const DequantizeProblem& problem, cudaStream_t stream) {
  dequantize_kernel<kFormat, kToBf16, kAligned>
      <<<blocks_for_rows(problem.cache.num_slots()), kThreads, 0, stream>>>(problem);
}

template <typename Problem>
Status launch_any(const Problem& problem, bool is_aligned, const Place& place, const char* what) {
  const DeviceScope scope(place.device);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  const auto stream = static_cast<cudaStream_t>(place.stream);
  return for_format(problem.format, [&]<KvFormat kFormat>() {
    if (problem.kv_is_bf16) {
      is_aligned ? launch<kFormat, true, true>(problem, stream) : launch<kFormat, true, false>(problem, stream);
    } else {
      is_aligned ? launch<kFormat, false, true>(problem, stream) : launch<kFormat, false, false>(problem, stream);
    }
    return launched(what);
  });
}

// Elements of 2 or 4 bytes in multiples of 16 bytes.
bool is_whole_vectors(std::int64_t stride, bool is_bf16) {
  return stride % (is_bf16 ? 8 : 4) == 0;
}

}  // namespace

Status dequantize(const DequantizeProblem& problem, const Place& place) {
  if (problem.cache.num_slots() == 0) return {};
  const bool is_aligned = is_multiple_of_16(problem.kv) &&
                          is_whole_vectors(problem.kv_stride_page, problem.kv_is_bf16) &&
                          is_whole_vectors(problem.kv_stride_token, problem.kv_is_bf16);
  return launch_any(problem, is_aligned, place, "launching the dequantise kernel");
}

Status gather_dequantize(const GatherProblem& problem, const Place& place) {
  const bool is_empty =
      problem.rows == 0 || (problem.slots.data == nullptr && (problem.b == 0 || problem.max_pages == 0));
  if (is_empty) return {};
  const bool is_aligned = is_multiple_of_16(problem.kv) && is_whole_vectors(problem.kv_stride, problem.kv_is_bf16);
  return launch_any(problem, is_aligned, place, "launching the gather kernel");
}

}  // namespace chiasma::gpu
