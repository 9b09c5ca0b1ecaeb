// Small random decode problems for tests of src/cpu: every format, odd pages, strides with gaps, masked and duplicate
// entries, lengths, sinks.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/cpu/paged_cache.h"

namespace chiasma::test {

struct ProblemShape {
  KvFormat format = KvFormat::v32;
  std::int64_t b = 2, s_q = 2;
  int h_q = 3;
  std::int64_t pages = 3, page_size = 4, page_gap = 0;
  std::int64_t topk = 9;
  std::int64_t extra_pages = 0, extra_page_size = 2, extra_topk = 0;
  bool lengths = false, sinks = false;
  bool q_pair = false;           // the rotary columns of the query are a tensor of their own
  bool length_each_row = false;  // with lengths: one for each query token
  float sm_scale = 0.0625f;
  float valid = 0.7f;  // fraction of entries that select something
};

// Owns everything a DecodeProblem points to. out and lse are left null.
class RandomProblem {
 public:
  RandomProblem(const ProblemShape& shape, std::uint64_t seed)
      : random_(static_cast<std::mt19937::result_type>(seed)),
        cache_(shape.format, shape.pages, shape.page_size, shape.page_gap),
        extra_cache_(shape.format, shape.extra_pages, shape.extra_page_size, shape.page_gap) {
    fill_cache(shape.format, cache_);
    fill_cache(shape.format, extra_cache_);
    const int dim = key_dim(shape.format);
    problem.format = shape.format;
    problem.sm_scale = shape.sm_scale;
    problem.b = shape.b;
    problem.s_q = shape.s_q;
    problem.h_q = shape.h_q;

    problem.q_stride_h = dim + 8;  // gaps hold NaN
    problem.q_stride_s = problem.q_stride_h * shape.h_q + 16;
    problem.q_stride_b = problem.q_stride_s * shape.s_q + 24;
    q_.assign(static_cast<std::size_t>(problem.q_stride_b * shape.b), bf16_t{0x7fff});
    for (std::int64_t row = 0; row < shape.b * shape.s_q * shape.h_q; ++row) {
      const std::int64_t i = row / shape.h_q / shape.s_q, s = row / shape.h_q % shape.s_q, h = row % shape.h_q;
      bf16_t* q = q_.data() + i * problem.q_stride_b + s * problem.q_stride_s + h * problem.q_stride_h;
      for (int c = 0; c < dim; ++c) q[c] = random_bf16(random_, 1.0f);
    }
    problem.q = q_.data();
    set_rope(shape, dim);

    problem.kv = cache_.pool();
    if (traits_of(shape.format).scale_type == ScaleType::cache) problem.kv.scale = 0.37f;
    problem.selection = select(shape, cache_.num_slots(), shape.topk, indices_, lengths_);
    if (shape.extra_pages > 0) {
      problem.extra_kv = extra_cache_.pool();
      problem.extra_selection =
          select(shape, extra_cache_.num_slots(), shape.extra_topk, extra_indices_, extra_lengths_);
    }
    if (shape.sinks) {
      constexpr float kInfinity = std::numeric_limits<float>::infinity();
      for (int h = 0; h < shape.h_q; ++h) {
        const float sinks[] = {std::normal_distribution<float>(0.0f, 3.0f)(random_), kInfinity, -kInfinity, 0.0f};
        sinks_.insert(sinks_.end(), {sinks[h % 4], std::numeric_limits<float>::quiet_NaN()});
      }
      problem.attn_sink = sinks_.data();
      problem.attn_sink_stride = 2;
    }
  }
  RandomProblem(const RandomProblem&) = delete;
  RandomProblem& operator=(const RandomProblem&) = delete;

  PagedCache& cache() { return cache_; }

  DecodeProblem problem{};

 private:
  // For a pair the rotary columns move to a tensor with other strides, and NaN takes their place.
  void set_rope(const ProblemShape& shape, int dim) {
    problem.q_is_one_tensor = !shape.q_pair;
    problem.q_rope = problem.q + (dim - kRopeDim);
    problem.q_rope_stride_b = problem.q_stride_b;
    problem.q_rope_stride_s = problem.q_stride_s;
    problem.q_rope_stride_h = problem.q_stride_h;
    if (!shape.q_pair) return;
    problem.q_rope_stride_h = kRopeDim + 3;
    problem.q_rope_stride_b = problem.q_rope_stride_h * shape.h_q + 1;
    problem.q_rope_stride_s = problem.q_rope_stride_b * shape.b + 2;
    q_rope_.assign(static_cast<std::size_t>(problem.q_rope_stride_s * shape.s_q), bf16_t{0x7fff});
    for (std::int64_t row = 0; row < shape.b * shape.s_q * shape.h_q; ++row) {
      const std::int64_t i = row / shape.h_q / shape.s_q, s = row / shape.h_q % shape.s_q, h = row % shape.h_q;
      bf16_t* from =
          q_.data() + i * problem.q_stride_b + s * problem.q_stride_s + h * problem.q_stride_h + dim - kRopeDim;
      bf16_t* to =
          q_rope_.data() + i * problem.q_rope_stride_b + s * problem.q_rope_stride_s + h * problem.q_rope_stride_h;
      std::copy_n(from, kRopeDim, to);
      std::fill_n(from, kRopeDim, bf16_t{0x7fff});
    }
    problem.q_rope = q_rope_.data();
  }

  int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  // Any code but NaN, scales of any significand (the formats' writers differ), ordinary bf16.
  void fill_cache(KvFormat format, PagedCache& cache) {
    for (std::int64_t slot = 0; slot < cache.num_slots(); ++slot) {
      const std::int64_t offset = slot % cache.page_size();
      std::byte* page = cache.page(slot / cache.page_size());
      std::byte* row = page + offset * row_stride_bytes(format);
      const RowTraits traits = traits_of(format);
      for (int c = 0; c < traits.code_columns; ++c) row[c] = std::byte(uniform(0, 1) * 128 + uniform(0, 0x5f));
      fill_bf16(row + traits.bf16_offset, traits.bf16_columns);
      std::byte* scales = (traits.has_scale_plane() ? page + plane_offset(format, cache.page_size(), offset) : row) +
                          traits.scales_offset;
      if (traits.scale_type == ScaleType::ue8m0) {
        const int group = std::max(traits.num_scales(), traits.plane_group_bytes);
        for (int i = 0; i < group; ++i) {
          scales[i] = i < traits.num_scales() ? std::byte(uniform(123, 128)) : std::byte{0xff};
        }
      }
      for (int i = 0; i < traits.num_scales() && traits.scale_type == ScaleType::float32; ++i) {
        const float scale = std::exp2(static_cast<float>(uniform(-400, 100)) / 100.0f);
        std::memcpy(scales + 4 * i, &scale, 4);
      }
    }
  }

  void fill_bf16(std::byte* bytes, int count) {
    for (int i = 0; i < count; ++i) {
      const bf16_t value = random_bf16(random_, 1.0f);
      std::memcpy(bytes + 2 * i, &value, 2);
    }
  }

  std::int32_t random_index(std::int64_t num_slots, float valid) {
    if (num_slots > 0 && std::uniform_real_distribution<float>(0, 1)(random_) < valid) {
      return uniform(0, static_cast<int>(num_slots) - 1);
    }
    const std::int32_t masked[] = {-1, -2, static_cast<std::int32_t>(num_slots),
                                   std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()};
    return masked[uniform(0, 4)];
  }

  Selection select(const ProblemShape& shape, std::int64_t num_slots, std::int64_t topk,
                   std::vector<std::int32_t>& indices, std::vector<std::int32_t>& lengths) {
    Selection selection{};
    selection.topk = topk;
    selection.stride_s = topk + 3;  // gaps hold slot 0, which is wrong to count
    selection.stride_b = selection.stride_s * shape.s_q + 5;
    indices.assign(static_cast<std::size_t>(selection.stride_b * shape.b), 0);
    for (std::int64_t row = 0; row < shape.b * shape.s_q; ++row) {
      std::int32_t* entries =
          indices.data() + row / shape.s_q * selection.stride_b + row % shape.s_q * selection.stride_s;
      for (std::int64_t entry = 0; entry < topk; ++entry) entries[entry] = random_index(num_slots, shape.valid);
    }
    selection.indices = indices.data();
    if (shape.lengths) {
      // Stride 2: every other element is a trap.
      for (std::int64_t i = 0; i < shape.b * (shape.length_each_row ? shape.s_q : 1); ++i) {
        const std::int32_t outside[] = {-1, std::numeric_limits<std::int32_t>::min(),
                                        static_cast<std::int32_t>(topk) + 1, std::numeric_limits<std::int32_t>::max()};
        const int inside = uniform(0, static_cast<int>(topk));
        lengths.insert(lengths.end(), {uniform(0, 3) == 0 ? outside[uniform(0, 3)] : inside, 1});
      }
      selection.length = lengths.data();
      selection.length_stride_b = shape.length_each_row ? 2 * shape.s_q : 2;
      selection.length_stride_s = shape.length_each_row ? 2 : 0;
    }
    return selection;
  }

  std::mt19937 random_;
  PagedCache cache_, extra_cache_;
  std::vector<bf16_t> q_, q_rope_;
  std::vector<std::int32_t> indices_, extra_indices_, lengths_, extra_lengths_;
  std::vector<float> sinks_;
};

}  // namespace chiasma::test
