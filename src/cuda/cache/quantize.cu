// quantize: bf16 rows to stored rows. A warp a row; a lane has 16 neighbouring columns, and lanes of one scale tile
// share its largest magnitude by shuffles.
#include "cuda/cache/rows.cuh"
#include "cuda/cache/tile_quotient.h"
#include "cuda/ptx/async_copy.cuh"
#include "format/quantize_tile.h"

namespace chiasma::gpu {
namespace {

struct Columns {
  std::uint32_t word[kLaneColumns / 2];  // two bf16 each

  __device__ bf16_t operator[](int i) const {
    return {static_cast<std::uint16_t>(i % 2 == 0 ? word[i / 2] & 0xffffu : word[i / 2] >> 16)};
  }
};

// 16 numbers of a row from `column` on. They never lie on both sides of where the rotary columns begin.
template <bool kAligned>
__device__ __forceinline__ Columns load_columns(const QuantizeProblem& problem, std::int64_t token, int column,
                                                int rope_begin) {
  const bf16_t* from = column < rope_begin ? problem.kv + token * problem.kv_stride + column
                                           : problem.rope + token * problem.rope_stride + (column - rope_begin);
  Columns columns;
  if constexpr (kAligned) {
    const uint4 first = __ldg(reinterpret_cast<const uint4*>(from));
    const uint4 second = __ldg(reinterpret_cast<const uint4*>(from) + 1);
    const std::uint32_t words[] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < kLaneColumns / 2; ++i) columns.word[i] = words[i];
  } else {
    const auto* numbers = reinterpret_cast<const std::uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < kLaneColumns / 2; ++i) {
      columns.word[i] = __ldg(numbers + 2 * i) | static_cast<std::uint32_t>(__ldg(numbers + 2 * i + 1)) << 16;
    }
  }
  return columns;
}

// What the numbers of a lane say of their tile.
struct Magnitude {
  float amax = 0.0f;  // the largest that is finite
  int num_nonfinite = 0;
};

// Magnitudes of bf16 order as their bits do, which compare two at a time. PERF: only where one is not finite each is
// looked at by itself.
__device__ __forceinline__ Magnitude magnitude_of(const Columns& columns) {
  constexpr std::uint32_t kInfinity = 0x7f80;
  std::uint32_t pair = 0;
#pragma unroll
  for (int i = 0; i < kLaneColumns / 2; ++i) pair = __vmaxu2(pair, columns.word[i] & 0x7fff7fffu);
  const std::uint32_t largest = max(pair & 0xffffu, pair >> 16);
  if (largest < kInfinity) return {__uint_as_float(largest << 16), 0};
  Magnitude magnitude;
#pragma unroll 1
  for (int i = 0; i < kLaneColumns / 2; ++i) {
    // A choice among registers, which have no addresses.
    std::uint32_t word = 0;
#pragma unroll
    for (int n = 0; n < kLaneColumns / 2; ++n) word = n == i ? columns.word[n] : word;
    for (const float number : {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)}) {
      magnitude.amax = larger_finite(magnitude.amax, number);
      magnitude.num_nonfinite += is_finite(number) ? 0 : 1;
    }
  }
  return magnitude;
}

// The largest among `kLanes` neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float largest_of_lanes(float value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// Two codes; the instruction rounds and saturates as float_to_e4m3() does (cache_ops_test holds it against that).
__device__ __forceinline__ std::uint32_t codes_of(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// How a format divides by scales. Those of tiles bound their numbers; the scale of a whole cache is any number.
enum class Division { by_power_of_two, by_tile_scale, by_any };

// Codes of 16 columns. Where some are not finite, or all of the tile are 0, the plain way.
template <Division kDivision>
__device__ __forceinline__ uint4 quantize_columns(const Columns& columns, float scale, float amax, bool all_finite) {
  std::uint32_t words[4] = {};
  if (all_finite && amax > 0.0f) {
    const TileQuotient<kDivision == Division::by_power_of_two> quotient(scale);
    const auto divided = [&](int i) {
      if constexpr (kDivision == Division::by_any) return __fdiv_rn(to_float(columns[i]), scale);
      return quotient.of(to_float(columns[i]));
    };
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 2) words[i / 4] |= codes_of(divided(i), divided(i + 1)) << i % 4 * 8;
  } else {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      words[i / 4] |= static_cast<std::uint32_t>(quantize_number(to_float(columns[i]), scale, amax)) << i % 4 * 8;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <KvFormat kFormat>
struct Tiling {
  static constexpr RowTraits kTraits = traits_of(kFormat);
  static constexpr bool kHasScales = kTraits.scale_type == ScaleType::float32 || kTraits.scale_type == ScaleType::ue8m0;
  static constexpr int kLanesPerTile = kHasScales ? kTraits.scale_columns / kLaneColumns : kWarp;
};

// Each tile's scale by its first lane, with the padding of a group of the scale plane, in one access.
template <KvFormat kFormat>
__device__ __forceinline__ void store_scales(std::byte* scales, int lane, float scale) {
  using Format = Tiling<kFormat>;
  constexpr RowTraits kTraits = Format::kTraits;
  if constexpr (Format::kHasScales) {
    constexpr bool kIsByte = kTraits.scale_type == ScaleType::ue8m0;
    constexpr int kStored = kIsByte && kTraits.has_scale_plane() ? kTraits.plane_group_bytes : kTraits.num_scales();
    static_assert(kStored * Format::kLanesPerTile <= kWarp);
    const int tile = lane / Format::kLanesPerTile;
    if (lane % Format::kLanesPerTile != 0 || tile >= kStored) return;
    if constexpr (kIsByte) {
      reinterpret_cast<std::uint8_t*>(scales)[tile] = tile < kTraits.num_scales() ? ue8m0_of(scale) : 0;
    } else {
      reinterpret_cast<float*>(scales)[tile] = scale;
    }
  }
}

__device__ __forceinline__ void store_bf16(std::byte* to, const Columns& columns) {
  auto* words = reinterpret_cast<uint4*>(to);
  words[0] = make_uint4(columns.word[0], columns.word[1], columns.word[2], columns.word[3]);
  words[1] = make_uint4(columns.word[4], columns.word[5], columns.word[6], columns.word[7]);
}

// Stores what a lane's columns become, codes or themselves.
template <KvFormat kFormat, bool kIsPow2>
__device__ __forceinline__ void store_columns(const Columns& columns, int column, float scale, float amax,
                                              int num_nonfinite, std::byte* row) {
  constexpr RowTraits kTraits = traits_of(kFormat);
  if (column >= kTraits.code_columns) {
    return store_bf16(row + kTraits.bf16_offset + 2 * (column - kTraits.code_columns), columns);
  }
  constexpr Division kDivision = !Tiling<kFormat>::kHasScales ? Division::by_any
                                 : kIsPow2                    ? Division::by_power_of_two
                                                              : Division::by_tile_scale;
  *reinterpret_cast<uint4*>(row + column) = quantize_columns<kDivision>(columns, scale, amax, num_nonfinite == 0);
}

// PERF: what a row fills only in part L2 must read, late, when it writes the sector back; asked for now, it is there by
// then. Each row may share its first sector, its last and that of its scales with others.
template <KvFormat kFormat>
__device__ __forceinline__ void prefetch_shared_sectors(const std::byte* row, const std::byte* scales, int lane) {
  constexpr std::uintptr_t kSector = 32;
  const std::byte* end = row + traits_of(kFormat).row_bytes;
  const std::byte* edge = lane == 0 ? row : lane == 1 ? end : scales;
  const bool is_shared = lane < 2 ? reinterpret_cast<std::uintptr_t>(edge) % kSector != 0
                                  : lane == 2 && traits_of(kFormat).has_scale_plane();
  if (is_shared) ptx::prefetch_l2(lane == 1 ? edge - 1 : edge);
}

// Returns how many of the lane's inputs are NaN or infinite.
template <KvFormat kFormat, bool kAligned, bool kIsPow2>
__device__ __forceinline__ int quantize_row(const QuantizeProblem& problem, std::int64_t token, std::int64_t slot,
                                            int lane) {
  using Format = Tiling<kFormat>;
  constexpr RowTraits kTraits = traits_of(kFormat);
  constexpr int kRopeBegin = kTraits.key_dim() - kRopeDim;
  constexpr int kExtraLanes = (kTraits.key_dim() - kMainColumns) / kLaneColumns;
  const RowPlace place = place_of<kFormat>(problem.pool, paged_token(slot, problem.pool.page_size));
  std::byte* row = problem.cache + place.row;
  std::byte* scales = problem.cache + place.scales;
  prefetch_shared_sectors<kFormat>(row, scales, lane);

  const Columns main = load_columns<kAligned>(problem, token, lane * kLaneColumns, kRopeBegin);
  Columns extra{};
  if (kExtraLanes > 0 && lane < kExtraLanes) {
    extra = load_columns<kAligned>(problem, token, kMainColumns + lane * kLaneColumns, kRopeBegin);
  }
  const Magnitude of_main = magnitude_of(main);
  const Magnitude of_extra = kExtraLanes > 0 ? magnitude_of(extra) : Magnitude{};
  const float own = kTraits.code_columns > kMainColumns ? fmaxf(of_main.amax, of_extra.amax) : of_main.amax;
  const float amax = kTraits.is_quantized() ? largest_of_lanes<Format::kLanesPerTile>(own) : 0.0f;
  const float scale =
      Format::kHasScales ? tile_scale(kIsPow2 ? ScaleMode::pow2 : ScaleMode::amax, amax) : problem.pool.scale;
  store_columns<kFormat, kIsPow2>(main, lane * kLaneColumns, scale, amax, of_main.num_nonfinite, row);
  if (kExtraLanes > 0 && lane < kExtraLanes) {
    store_columns<kFormat, kIsPow2>(extra, kMainColumns + lane * kLaneColumns, scale, amax, of_extra.num_nonfinite,
                                    row);
  }
  store_scales<kFormat>(scales, lane, scale);
  return of_main.num_nonfinite + of_extra.num_nonfinite;
}

__device__ __forceinline__ void add_count(std::int64_t* total, int count) {
  if (total == nullptr || count == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(count));
}

template <KvFormat kFormat, bool kAligned, bool kIsPow2>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    quantize_kernel(const __grid_constant__ QuantizeProblem problem) {
  const int lane = threadIdx.x % kWarp;
  const auto slot_of = [&](std::int64_t token) -> std::int64_t {
    if (token >= problem.tokens) return -1;
    return problem.slot_mapping == nullptr ? token : __ldg(problem.slot_mapping + token * problem.slot_mapping_stride);
  };
  int num_nonfinite = 0, num_skipped = 0;
  // PERF: a row's slot is on its way while the row before is worked on.
  std::int64_t next = slot_of(first_row());
  for (std::int64_t token = first_row(); token < problem.tokens; token += row_stride()) {
    const std::int64_t slot = next;
    next = slot_of(token + row_stride());
    if (slot < 0 || slot >= problem.pool.num_slots()) {
      num_skipped += slot != -1 ? 1 : 0;
      continue;
    }
    num_nonfinite += quantize_row<kFormat, kAligned, kIsPow2>(problem, token, slot, lane);
  }
  // All lanes of a warp have skipped the same rows.
  if (lane == 0) add_count(problem.skipped_count, num_skipped);
  if (problem.nonfinite_count == nullptr) return;
  num_nonfinite = __reduce_add_sync(0xffffffffu, num_nonfinite);
  if (lane == 0) add_count(problem.nonfinite_count, num_nonfinite);
}

bool has_16_byte_rows(const QuantizeProblem& problem) {
  return is_multiple_of_16(problem.kv) && is_multiple_of_16(problem.rope) && problem.kv_stride % 8 == 0 &&
         problem.rope_stride % 8 == 0;
}

template <KvFormat kFormat>
void launch(const QuantizeProblem& problem, cudaStream_t stream) {
  const unsigned blocks = blocks_for_rows(problem.tokens);
  constexpr int kThreads = kWarp * kWarpsPerBlock;
  const bool pow2 = problem.scale == ScaleMode::pow2;
  if (has_16_byte_rows(problem)) {
    if (pow2) return quantize_kernel<kFormat, true, true><<<blocks, kThreads, 0, stream>>>(problem);
    return quantize_kernel<kFormat, true, false><<<blocks, kThreads, 0, stream>>>(problem);
  }
  if (pow2) return quantize_kernel<kFormat, false, true><<<blocks, kThreads, 0, stream>>>(problem);
  quantize_kernel<kFormat, false, false><<<blocks, kThreads, 0, stream>>>(problem);
}

}  // namespace

Status quantize(const QuantizeProblem& problem, const Place& place) {
  const DeviceScope scope(place.device);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  const auto stream = static_cast<cudaStream_t>(place.stream);
  for (std::int64_t* count : {problem.nonfinite_count, problem.skipped_count}) {
    if (count == nullptr) continue;
    CHIASMA_RETURN_IF_ERROR(to_status(cudaMemsetAsync(count, 0, sizeof(std::int64_t), stream), "setting a count to 0"));
  }
  if (problem.tokens == 0) return {};
  return for_format(problem.format, [&]<KvFormat kFormat>() {
    launch<kFormat>(problem, stream);
    return launched("launching the quantise kernel");
  });
}

}  // namespace chiasma::gpu
