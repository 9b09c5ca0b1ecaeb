#include "cpu/cache_ops.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kv_rows.h"
#include "cpu/quantize_tile.h"

namespace chiasma::cpu {
namespace {

// Fewer rows than this are not worth waking threads for.
constexpr std::int64_t kMinParallelRows = 64;

struct TileShape {
  int num_tiles, tile_dim, rope_offset;
};

constexpr TileShape tile_shape(KvFormat format) {
  return format == KvFormat::v4 ? TileShape{v4::kNumTiles, v4::kTileDim, v4::kRopeOffset}
                                : TileShape{v32::kNumTiles, v32::kTileDim, v32::kRopeOffset};
}

void store_scale(KvFormat format, float scale, int tile, std::byte* scales) {
  if (format == KvFormat::v4) {
    scales[tile] = static_cast<std::byte>(std::bit_cast<std::uint32_t>(scale) >> 23);
  } else {
    std::memcpy(scales + tile * v32::kScaleBytes, &scale, sizeof(scale));
  }
}

// Returns how many of the row's inputs are NaN or infinite.
int quantize_row(KvFormat format, ScaleMode mode, const bf16_t* kv, std::byte* row, std::byte* scales) {
  constexpr int kMaxTileDim = std::max(v32::kTileDim, v4::kTileDim);
  const TileShape shape = tile_shape(format);
  int num_nonfinite = 0;
  for (int tile = 0; tile < shape.num_tiles; ++tile) {
    float values[kMaxTileDim];
    std::uint8_t codes[kMaxTileDim];
    for (int i = 0; i < shape.tile_dim; ++i) values[i] = to_float(kv[tile * shape.tile_dim + i]);
    const TileScale result = quantize_tile(values, shape.tile_dim, mode, codes);
    std::memcpy(row + tile * shape.tile_dim, codes, static_cast<std::size_t>(shape.tile_dim));
    store_scale(format, result.scale, tile, scales);
    num_nonfinite += result.num_nonfinite;
  }
  if (format == KvFormat::v4) scales[v4::kNumTiles] = std::byte{0};

  const bf16_t* rope = kv + shape.num_tiles * shape.tile_dim;
  std::memcpy(row + shape.rope_offset, rope, kRopeDim * sizeof(bf16_t));
  constexpr std::uint16_t kInfinityBits = 0x7f80u;
  for (int i = 0; i < kRopeDim; ++i) num_nonfinite += (rope[i].bits & kInfinityBits) == kInfinityBits ? 1 : 0;
  return num_nonfinite;
}

void dequantize_row(const DequantizeProblem& problem, std::int64_t slot) {
  const int dim = key_dim(problem.format);
  const std::int64_t begin = slot / problem.cache.page_size * problem.kv_stride_page +
                             slot % problem.cache.page_size * problem.kv_stride_token;
  if (!problem.kv_is_bf16) {
    load_key(problem.format, problem.cache, slot, static_cast<float*>(problem.kv) + begin);
    return;
  }
  float key[v32::kKeyDim];
  load_key(problem.format, problem.cache, slot, key);
  bf16_t* kv = static_cast<bf16_t*>(problem.kv) + begin;
  const int nope_dim = dim - kRopeDim;
  for (int c = 0; c < nope_dim; ++c) kv[c] = to_bf16(key[c]);
  const std::byte* rope = locate_row(problem.format, problem.cache, slot).row + tile_shape(problem.format).rope_offset;
  std::memcpy(kv + nope_dim, rope, kRopeDim * sizeof(bf16_t));
}

float load_out(const MergeProblem& problem, std::int64_t element) {
  return problem.part_out_is_bf16 ? to_float(static_cast<const bf16_t*>(problem.part_out)[element])
                                  : static_cast<const float*>(problem.part_out)[element];
}

void store_out(const MergeProblem& problem, std::int64_t element, double value) {
  if (problem.out_is_bf16) {
    static_cast<bf16_t*>(problem.out)[element] = to_bf16(static_cast<float>(value));
  } else {
    static_cast<float*>(problem.out)[element] = static_cast<float>(value);
  }
}

void merge_row(const MergeProblem& problem, std::int64_t request, std::int64_t query_token, std::int64_t head) {
  const auto offset = [&](const std::int64_t* stride) {
    return request * stride[0] + query_token * stride[1] + head * stride[2];
  };
  const float* part_lse = problem.part_lse + offset(problem.part_lse_stride + 1);
  const std::int64_t part_out = offset(problem.part_out_stride + 1);
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  const auto lse_of = [&](std::int64_t part) {
    return static_cast<double>(part_lse[part * problem.part_lse_stride[0]]);
  };

  double max_lse = kEmpty;
  double sum = 0.0;
  double out[kValueDim];
  std::fill_n(out, kValueDim, -0.0);  // WHY: 0.0 + -0.0 would lose the sign that a single part's zero has
  for (std::int64_t part = 0; part < problem.parts; ++part) max_lse = std::max(max_lse, lse_of(part));
  for (std::int64_t part = 0; part < problem.parts; ++part) {
    const double lse = lse_of(part);
    if (lse == kEmpty) continue;
    const double weight = std::exp(lse - max_lse);
    sum += weight;
    const std::int64_t begin = part * problem.part_out_stride[0] + part_out;
    for (int c = 0; c < kValueDim; ++c) out[c] += weight * load_out(problem, begin + c);
  }

  // With one part that is not empty weight and sum are 1, and both results pass unchanged.
  const bool all_empty = sum == 0.0;
  const std::int64_t out_begin = offset(problem.out_stride);
  for (int c = 0; c < kValueDim; ++c) store_out(problem, out_begin + c, all_empty ? 0.0 : out[c] / sum);
  problem.lse[offset(problem.lse_stride)] = static_cast<float>(all_empty ? kEmpty : max_lse + std::log(sum));
}

}  // namespace

void quantize(const QuantizeProblem& problem) {
  const KvPool pool{problem.cache, problem.page_stride_bytes, problem.num_pages, problem.page_size};
  std::int64_t num_nonfinite = 0;
  // WHY each thread walks the whole mapping and takes the slots that are its own: rows that share a slot are then
  // stored by one thread in their order, so that the last one stays.
#pragma omp parallel reduction(+ : num_nonfinite) if (problem.tokens >= kMinParallelRows)
  {
    const int num_threads = omp_get_num_threads();
    const int thread = omp_get_thread_num();
    for (std::int64_t token = 0; token < problem.tokens; ++token) {
      const std::int64_t slot =
          problem.slot_mapping == nullptr ? token : problem.slot_mapping[token * problem.slot_mapping_stride];
      if (slot < 0 || slot >= pool.num_slots() || slot % num_threads != thread) continue;
      const RowBytes bytes = locate_row(problem.format, pool, slot);
      std::byte* row = problem.cache + (bytes.row - pool.data);
      std::byte* scales = problem.cache + (bytes.scales - pool.data);
      num_nonfinite += quantize_row(problem.format, problem.scale, problem.kv + token * problem.kv_stride, row, scales);
    }
  }
  if (problem.nonfinite_count != nullptr) *problem.nonfinite_count = num_nonfinite;
}

void dequantize(const DequantizeProblem& problem) {
  const std::int64_t num_slots = problem.cache.num_slots();
#pragma omp parallel for if (num_slots >= kMinParallelRows)
  for (std::int64_t slot = 0; slot < num_slots; ++slot) dequantize_row(problem, slot);
}

void merge(const MergeProblem& problem) {
  const std::int64_t num_rows = problem.b * problem.s_q * problem.h_q;
#pragma omp parallel for if (num_rows >= kMinParallelRows)
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t query = row / problem.h_q;
    merge_row(problem, query / problem.s_q, query % problem.s_q, row % problem.h_q);
  }
}

}  // namespace chiasma::cpu
