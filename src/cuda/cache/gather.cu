// gather_dequantize and dequantize: stored rows to float32 or bf16 rows. A warp a row, 16 neighbouring columns a lane.
#include "cuda/cache/rows.cuh"

namespace chiasma::gpu {
namespace {

// Where rows go.
struct Target {
  void* kv;
  bool is_bf16;
};

// 16 numbers of a stored row from `column` on, as float32. bits: of numbers that are stored as bf16, as they are.
struct Numbers {
  float value[kLaneColumns];
  std::uint32_t bits[kLaneColumns / 2];
  bool has_bits;
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

__device__ __forceinline__ void load_bf16(Numbers& numbers, const std::byte* from) {
  const uint4 first = __ldg(reinterpret_cast<const uint4*>(from));
  const uint4 second = __ldg(reinterpret_cast<const uint4*>(from) + 1);
  const std::uint32_t words[] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < kLaneColumns / 2; ++i) {
    numbers.bits[i] = words[i];
    numbers.value[2 * i] = __uint_as_float(words[i] << 16);
    numbers.value[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  numbers.has_bits = true;
}

template <KvFormat kFormat>
__device__ __forceinline__ Numbers load_numbers(const KvPool& pool, const RowPlace& place, int column) {
  constexpr RowTraits kTraits = traits_of(kFormat);
  Numbers numbers;
  const std::byte* row = pool.data + place.row;
  if constexpr (!kTraits.is_quantized()) {
    load_bf16(numbers, row + 2 * column);
  } else {
    if (kTraits.bf16_columns > 0 && column >= kTraits.code_columns) {
      load_bf16(numbers, row + kTraits.bf16_offset + 2 * (column - kTraits.code_columns));
      return numbers;
    }
    const uint4 codes = __ldg(reinterpret_cast<const uint4*>(row + column));
    const float scale = scale_of<kFormat>(pool, pool.data + place.scales, column);
    const std::uint32_t words[] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const auto code = static_cast<std::uint8_t>(words[i / 4] >> i % 4 * 8);
      numbers.value[i] = with_one_nan(__fmul_rn(e4m3_to_float(code), scale));
    }
    numbers.has_bits = false;
  }
  return numbers;
}

__device__ __forceinline__ std::uint32_t bf16_pair(float low, float high) {
  return to_bf16(low).bits | static_cast<std::uint32_t>(to_bf16(high).bits) << 16;
}

template <bool kToBf16, bool kAligned>
__device__ __forceinline__ void store_numbers(const Numbers& numbers, void* kv, std::int64_t element) {
  if constexpr (kToBf16) {
    std::uint32_t words[kLaneColumns / 2];
#pragma unroll
    for (int i = 0; i < kLaneColumns / 2; ++i) {
      words[i] = numbers.has_bits ? numbers.bits[i] : bf16_pair(numbers.value[2 * i], numbers.value[2 * i + 1]);
    }
    auto* to = static_cast<std::uint16_t*>(kv) + element;
    if constexpr (kAligned) {
      reinterpret_cast<uint4*>(to)[0] = make_uint4(words[0], words[1], words[2], words[3]);
      reinterpret_cast<uint4*>(to)[1] = make_uint4(words[4], words[5], words[6], words[7]);
    } else {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) to[i] = static_cast<std::uint16_t>(words[i / 2] >> i % 2 * 16);
    }
  } else {
    float* to = static_cast<float*>(kv) + element;
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      if constexpr (kAligned) {
        *reinterpret_cast<float4*>(to + i) =
            make_float4(numbers.value[i], numbers.value[i + 1], numbers.value[i + 2], numbers.value[i + 3]);
      } else {
        for (int n = i; n < i + 4; ++n) to[n] = numbers.value[n];
      }
    }
  }
}

// slot: outside of the cache for a row of zeros. element: of kv, where the row begins.
template <KvFormat kFormat, bool kToBf16, bool kAligned>
__device__ __forceinline__ void copy_row(const KvPool& pool, std::int64_t slot, void* kv, std::int64_t element,
                                         int lane) {
  constexpr int kExtraLanes = (traits_of(kFormat).key_dim() - kMainColumns) / kLaneColumns;
  const bool exists = slot >= 0 && slot < pool.num_slots();
  RowPlace place{};
  if (exists) place = place_of<kFormat>(pool, slot);
  Numbers main{};
  Numbers extra{};
  const int extra_column = kMainColumns + lane * kLaneColumns;
  const bool has_extra = kExtraLanes > 0 && lane < kExtraLanes;
  if (exists) {
    main = load_numbers<kFormat>(pool, place, lane * kLaneColumns);
    if (has_extra) extra = load_numbers<kFormat>(pool, place, extra_column);
  }
  store_numbers<kToBf16, kAligned>(main, kv, element + lane * kLaneColumns);
  if (has_extra) store_numbers<kToBf16, kAligned>(extra, kv, element + extra_column);
}

__device__ __forceinline__ std::int64_t load_integer(const IntegerView& view, std::int64_t index) {
  if (view.is_int64) return __ldg(static_cast<const std::int64_t*>(view.data) + index * view.stride);
  return __ldg(static_cast<const std::int32_t*>(view.data) + index * view.stride);
}

// Row i from slot slots[i].
template <KvFormat kFormat, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    gather_slots_kernel(const __grid_constant__ GatherProblem problem) {
  for (std::int64_t row = first_row(); row < problem.rows; row += row_stride()) {
    copy_row<kFormat, kToBf16, kAligned>(problem.cache, load_integer(problem.slots, row), problem.kv,
                                         row * problem.kv_stride, threadIdx.x % kWarp);
  }
}

// Tokens of request blockIdx.y and on.
template <KvFormat kFormat, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    gather_pages_kernel(const __grid_constant__ GatherProblem problem) {
  const std::int64_t page_size = problem.cache.page_size;
  for (std::int64_t request = blockIdx.y; request < problem.b; request += gridDim.y) {
    const std::int64_t most = problem.max_pages * page_size;
    const std::int64_t given = __ldg(problem.seq_lens + request * problem.seq_lens_stride);
    const std::int64_t length = given < 0 ? 0 : given < most ? given : most;
    const std::int64_t start = load_integer(problem.starts, request);
    if (start >= problem.rows || start <= -length) continue;
    const std::int64_t last = length < problem.rows - start ? length : problem.rows - start;
    for (std::int64_t token = (start < 0 ? -start : 0) + first_row(); token < last; token += row_stride()) {
      const std::int64_t page = __ldg(problem.block_table + request * problem.block_table_stride + token / page_size);
      const std::int64_t slot = page < 0 ? -1 : page * page_size + token % page_size;
      copy_row<kFormat, kToBf16, kAligned>(problem.cache, slot, problem.kv, (start + token) * problem.kv_stride,
                                           threadIdx.x % kWarp);
    }
  }
}

template <KvFormat kFormat, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    dequantize_kernel(const __grid_constant__ DequantizeProblem problem) {
  const std::int64_t page_size = problem.cache.page_size;
  for (std::int64_t slot = first_row(); slot < problem.cache.num_slots(); slot += row_stride()) {
    const std::int64_t page = slot / page_size;
    copy_row<kFormat, kToBf16, kAligned>(
        problem.cache, slot, problem.kv,
        page * problem.kv_stride_page + (slot - page * page_size) * problem.kv_stride_token, threadIdx.x % kWarp);
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
