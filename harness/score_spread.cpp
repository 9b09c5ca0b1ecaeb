#include "harness/score_spread.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "format/kv_format.h"
#include "format/numbers.h"
#include "harness/workload.h"

namespace chiasma::harness {
namespace {

constexpr std::int64_t kMaxSampledKeys = 64;

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void load_key(const chiasma_decode_args& args, const chiasma_tensor& cache, std::int64_t slot, float* key) {
  const auto format = static_cast<KvFormat>(args.format);
  const RowTraits traits = traits_of(format);
  const std::int64_t page = cache.shape[1];
  const std::int64_t element_bytes = cache.dtype == CHIASMA_BFLOAT16 ? 2 : 1;
  const std::byte* page_begin =
      static_cast<const std::byte*>(cache.data) + slot / page * cache.stride[0] * element_bytes;
  const std::byte* row = page_begin + slot % page * traits.row_bytes;
  const std::byte* scales =
      (traits.has_scale_plane() ? page_begin + plane_offset(format, page, slot % page) : row) + traits.scales_offset;
  for (int c = 0; c < traits.code_columns; ++c) {
    const int tile = c / traits.scale_columns;
    const float scale = traits.scale_type == ScaleType::cache ? static_cast<float>(args.kv_scale)
                        : traits.scale_type == ScaleType::float32
                            ? load<float>(scales + tile * static_cast<int>(sizeof(float)))
                            : ue8m0_to_float(load<std::uint8_t>(scales + tile));
    key[c] = e4m3_to_float(load<std::uint8_t>(row + c)) * scale;
  }
  for (int c = 0; c < traits.bf16_columns; ++c) {
    key[traits.code_columns + c] = to_float(load<bf16_t>(row + traits.bf16_offset + 2 * c));
  }
}

// One head's query, RoPE last, from one tensor or two.
std::vector<float> load_query(const chiasma_decode_args& args, std::int64_t row, std::int64_t head) {
  const std::int64_t s_q = args.q.shape[1];
  std::vector<float> query;
  for (const chiasma_tensor* part : {&args.q, &args.q_rope}) {
    if (part->rank == 0) continue;
    const bf16_t* columns = static_cast<const bf16_t*>(part->data) + row / s_q * part->stride[0] +
                            row % s_q * part->stride[1] + head * part->stride[2];
    for (std::int64_t c = 0; c < part->shape[3]; ++c) query.push_back(to_float(columns[c]));
  }
  return query;
}

double deviation_of_head(const std::vector<float>& q, const std::vector<float>& keys, double sm_scale) {
  const auto dim = static_cast<std::int64_t>(q.size());
  const auto num_keys = static_cast<std::int64_t>(keys.size()) / dim;
  if (num_keys == 0) return 0.0;
  double sum = 0;
  double sum_of_squares = 0;
  double products_squared = 0;
  for (std::int64_t t = 0; t < num_keys; ++t) {
    double score = 0;
    double squares = 0;  // of products that float32 holds, while their squares may not fit
    for (std::int64_t c = 0; c < dim; ++c) {
      const double product =
          static_cast<double>(q[static_cast<std::size_t>(c)]) * keys[static_cast<std::size_t>(t * dim + c)];
      score += product;
      squares += product * product;
    }
    sum += score;
    sum_of_squares += score * score;
    products_squared += squares;
  }
  const auto n = static_cast<double>(num_keys);
  const double variance = std::max(0.0, sum_of_squares / n - (sum / n) * (sum / n));
  return std::abs(sm_scale) * std::sqrt(std::max(variance, products_squared / n));
}

}  // namespace

ScoreSpread::ScoreSpread(const chiasma_decode_args& args, std::int64_t row) {
  const int dim = key_dim(static_cast<KvFormat>(args.format));
  std::vector<float> keys;
  for (const bool extra : {false, true}) {
    const std::vector<std::int64_t> slots = selected_slots(args, row, extra);
    const auto count = static_cast<std::int64_t>(slots.size());
    num_selected_ += count;
    const std::int64_t num_sampled = std::min(count, kMaxSampledKeys);
    for (std::int64_t n = 0; n < num_sampled; ++n) {
      keys.resize(keys.size() + static_cast<std::size_t>(dim));
      load_key(args, extra ? args.extra_kv_cache : args.kv_cache,
               slots[static_cast<std::size_t>(n * count / num_sampled)], keys.data() + keys.size() - dim);
    }
  }
  const std::int64_t num_heads = args.q.shape[2];
  for (std::int64_t head = 0; head < num_heads; ++head) {
    deviation_.push_back(deviation_of_head(load_query(args, row, head), keys, args.sm_scale));
  }
}

}  // namespace chiasma::harness
