#include "harness/kv_pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "format/kv_format.h"
#include "format/numbers.h"
#include "harness/parallel.h"
#include "harness/random.h"

namespace chiasma::harness {
namespace {

// More different rows than this are not made: a pool of millions is filled with copies in hashed order.
constexpr std::int64_t kMaxDistinctRows = 32768;
constexpr int kNanByte = 0xff;

enum Stream : std::uint64_t { kRowStream = 1, kChannelStream, kLevelStream, kPageStream, kCopyStream, kTileStream };

// dist=outlier: about one channel in 64 is 10 to 50 times larger than the others.
float channel_factor(const Case& spec, std::uint64_t channel) {
  constexpr std::uint64_t kOneIn = 64;
  if (spec.dist != Distribution::kOutlier) return 1.0f;
  const std::uint64_t key = derive(spec.seed, kChannelStream);
  if (below(key, 2 * channel, kOneIn) != 0) return 1.0f;
  return 10.0f + static_cast<float>(below(key, 2 * channel + 1, 41));
}

// dist=extreme: tiles of a row, side by side, anywhere between 2^-100 and 2^100.
float tile_factor(std::uint64_t key, std::int64_t row, int channel) {
  constexpr int kTile = 128, kTilesPerRow = 5, kMaxExponent = 100;
  const std::uint64_t draw =
      below(derive(key, kTileStream), row * kTilesPerRow + channel / kTile, 2 * kMaxExponent + 1);
  return std::ldexp(1.0f, static_cast<int>(draw) - kMaxExponent);
}

std::vector<bf16_t> make_values(const Case& spec, std::uint64_t key, std::int64_t num_rows) {
  const int dim = key_dim(static_cast<KvFormat>(spec.fmt));
  std::vector<float> factors(static_cast<std::size_t>(dim));
  for (std::size_t c = 0; c < factors.size(); ++c) factors[c] = channel_factor(spec, c);
  std::vector<bf16_t> values(static_cast<std::size_t>(num_rows * dim));
  const std::uint64_t row_key = derive(key, kRowStream);
  parallel_ranges(num_rows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      // dist=const: a row is one of eight constants from 0.5 to 2.25.
      const float level = 0.5f + 0.25f * static_cast<float>(below(derive(key, kLevelStream), row, 8));
      for (int c = 0; c < dim; ++c) {
        float value = level;
        if (spec.dist != Distribution::kConst) {
          value = factors[static_cast<std::size_t>(c)] * gauss(row_key, row * dim + c);
        }
        if (spec.dist == Distribution::kExtreme) value *= tile_factor(key, row, c);
        values[static_cast<std::size_t>(row * dim + c)] = to_bf16(value);
      }
    }
  });
  return values;
}

// Rows as stored, in a cache of pages of one token.
struct RowTable {
  std::vector<std::byte> bytes;
  std::int64_t stride = 0;
  std::int64_t num_rows = 0;

  const std::byte* row(std::int64_t number) const { return bytes.data() + number * stride; }
};

bool make_rows(const Case& spec, std::uint64_t key, std::int64_t num_rows, RowTable* table, std::string* error) {
  if (num_rows == 0) return true;
  const auto format = static_cast<KvFormat>(spec.fmt);
  std::vector<bf16_t> values = make_values(spec, key, num_rows);
  table->num_rows = num_rows;
  table->stride = chiasma_kv_page_bytes(spec.fmt, 1);
  table->bytes.resize(static_cast<std::size_t>(num_rows * table->stride));
  const chiasma_device cpu = {CHIASMA_CPU, 0};
  const std::int64_t kv_shape[] = {num_rows, key_dim(format)};
  const std::int64_t cache_shape[] = {num_rows, 1, token_extent(format)};
  chiasma_quantize_args args = {};
  args.format = spec.fmt;
  args.scale = spec.scale;
  args.kv = chiasma_contiguous(values.data(), CHIASMA_BFLOAT16, cpu, 2, kv_shape);
  args.kv_scale = spec.kv_scale();
  const bool is_bytes = traits_of(format).is_quantized();
  args.kv_cache =
      chiasma_contiguous(table->bytes.data(), is_bytes ? CHIASMA_UINT8 : CHIASMA_BFLOAT16, cpu, 3, cache_shape);
  args.kv_cache.stride[0] = is_bytes ? table->stride : table->stride / 2;
  if (chiasma_quantize(&args, nullptr) != CHIASMA_OK) {
    *error = chiasma_last_error();
    return false;
  }
  return true;
}

void copy_row(KvFormat format, const std::byte* row, std::byte* page, int page_size, int offset) {
  const RowTraits traits = traits_of(format);
  std::memcpy(page + std::int64_t{offset} * traits.row_bytes, row, static_cast<std::size_t>(traits.row_bytes));
  std::memcpy(page + plane_offset(format, page_size, offset), row + plane_offset(format, 1, 0),
              static_cast<std::size_t>(traits.plane_group_bytes));
}

}  // namespace

std::int64_t PoolLayout::physical_page(std::int64_t logical_page) const {
  return static_cast<std::int64_t>(permute(static_cast<std::uint64_t>(logical_page),
                                           static_cast<std::uint64_t>(num_pages()), derive(key, kPageStream)));
}

std::int64_t PoolLayout::slot(std::int64_t request, std::int64_t token) const {
  return physical_page(request * pages_per_request() + token / page) * page + token % page;
}

bool fill_pool(const Case& spec, const PoolLayout& layout, const std::vector<bool>* selected, std::byte* pool,
               std::string* error) {
  const auto format = static_cast<KvFormat>(spec.fmt);
  const std::int64_t num_tokens = layout.requests * layout.tokens_per_request;
  RowTable table;
  if (!make_rows(spec, layout.key, std::min(num_tokens, kMaxDistinctRows), &table, error)) return false;

  const auto row_of_token = [&](std::int64_t token) {
    if (table.num_rows == num_tokens) return token;
    return static_cast<std::int64_t>(below(derive(layout.key, kCopyStream), token, table.num_rows));
  };
  parallel_ranges(layout.num_pages(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t logical = begin; logical < end; ++logical) {
      const std::int64_t physical = layout.physical_page(logical);
      std::byte* page = pool + physical * layout.page_stride_bytes;
      std::memset(page, kNanByte, static_cast<std::size_t>(layout.page_stride_bytes));
      const std::int64_t request = logical / std::max<std::int64_t>(1, layout.pages_per_request());
      if (logical == layout.num_pages() - 1) continue;  // the spare page
      const std::int64_t first_token = logical % layout.pages_per_request() * layout.page;
      const std::int64_t num_here = std::min(layout.page, layout.tokens_per_request - first_token);
      for (std::int64_t offset = 0; offset < num_here; ++offset) {
        if (selected != nullptr && !(*selected)[static_cast<std::size_t>(physical * layout.page + offset)]) continue;
        copy_row(format, table.row(row_of_token(request * layout.tokens_per_request + first_token + offset)), page,
                 static_cast<int>(layout.page), static_cast<int>(offset));
      }
    }
  });
  return true;
}

}  // namespace chiasma::harness
