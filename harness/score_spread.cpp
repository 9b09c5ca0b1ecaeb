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

struct Row {
  const std::byte* codes;
  const std::byte* scales;
  const std::byte* rope;
};

Row find_row(KvFormat format, const chiasma_tensor& cache, std::int64_t slot) {
  const std::int64_t page = cache.shape[1];
  const std::int64_t element_bytes = cache.dtype == CHIASMA_BFLOAT16 ? 2 : 1;
  const std::byte* page_begin =
      static_cast<const std::byte*>(cache.data) + slot / page * cache.stride[0] * element_bytes;
  const std::byte* row = page_begin + slot % page * row_stride_bytes(format);
  if (format == KvFormat::v32) return {row, row + v32::kScalesOffset, row + v32::kRopeOffset};
  if (format == KvFormat::v4) {
    return {row, page_begin + v4::scales_offset(static_cast<int>(page), static_cast<int>(slot % page)),
            row + v4::kRopeOffset};
  }
  return {row, nullptr, row};
}

void load_key(KvFormat format, const chiasma_tensor& cache, std::int64_t slot, float* key) {
  const Row row = find_row(format, cache, slot);
  const int nope_dim = format == KvFormat::v32 ? v32::kNopeDim : format == KvFormat::v4 ? v4::kNopeDim : 0;
  for (int c = 0; c < nope_dim; ++c) {
    const float scale = format == KvFormat::v32 ? load<float>(row.scales + c / v32::kTileDim * v32::kScaleBytes)
                                                : ue8m0_to_float(load<std::uint8_t>(row.scales + c / v4::kTileDim));
    key[c] = e4m3_to_float(load<std::uint8_t>(row.codes + c)) * scale;
  }
  for (int c = nope_dim; c < key_dim(format); ++c) key[c] = to_float(load<bf16_t>(row.rope + 2 * (c - nope_dim)));
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
  const auto format = static_cast<KvFormat>(args.format);
  const int dim = key_dim(format);
  std::vector<float> keys;
  for (const bool extra : {false, true}) {
    const std::vector<std::int64_t> slots = selected_slots(args, row, extra);
    const auto count = static_cast<std::int64_t>(slots.size());
    num_selected_ += count;
    const std::int64_t num_sampled = std::min(count, kMaxSampledKeys);
    for (std::int64_t n = 0; n < num_sampled; ++n) {
      keys.resize(keys.size() + static_cast<std::size_t>(dim));
      load_key(format, extra ? args.extra_kv_cache : args.kv_cache,
               slots[static_cast<std::size_t>(n * count / num_sampled)], keys.data() + keys.size() - dim);
    }
  }
  const std::int64_t num_heads = args.q.shape[2];
  for (std::int64_t head = 0; head < num_heads; ++head) {
    deviation_.push_back(deviation_of_head(load_query(args, row, head), keys, args.sm_scale));
  }
}

}  // namespace chiasma::harness
