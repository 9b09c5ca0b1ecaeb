// A second formulation of sparse MLA decoding, which shares nothing with the oracle but the problem's struct: the whole
// pool is decoded first, by offsets written out here, in long double; each slot's multiplicity replaces the list of
// entries; the softmax is shifted by the mean score instead of the largest.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "api/problem.h"

namespace chiasma::test {

using Real = long double;

inline Real e4m3_value(int code) {
  const Real sign = code & 0x80 ? -1 : 1;
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<Real>::quiet_NaN();
  return exponent == 0 ? sign * std::ldexp(Real(mantissa), -9) : sign * std::ldexp(Real(8 + mantissa), exponent - 10);
}

inline Real bf16_value(const unsigned char* bytes) {
  const int code = bytes[0] | bytes[1] << 8;
  const Real sign = code & 0x8000 ? -1 : 1;
  const int exponent = code >> 7 & 255;
  const int mantissa = code & 127;
  if (exponent == 255 && mantissa != 0) return std::numeric_limits<Real>::quiet_NaN();
  if (exponent == 255) return sign * std::numeric_limits<Real>::infinity();
  return exponent == 0 ? sign * std::ldexp(Real(mantissa), -133)
                       : sign * std::ldexp(Real(128 + mantissa), exponent - 134);
}

// Key of one token. Offsets as docs/kv_format.md states them.
inline std::vector<Real> brute_key(KvFormat format, const KvPool& pool, std::int64_t page_idx, std::int64_t offset) {
  const auto* page = reinterpret_cast<const unsigned char*>(pool.data) + page_idx * pool.page_stride_bytes;
  std::vector<Real> key;
  const auto codes = [&](const unsigned char* row, int count, int tile, auto&& scale) {
    for (int c = 0; c < count; ++c) key.push_back(e4m3_value(row[c]) * scale(c / tile));
  };
  const auto floats = [](const unsigned char* at) {
    return [at](int tile) {
      float scale = 0;
      std::memcpy(&scale, at + 4 * tile, 4);
      return Real(scale);
    };
  };
  const auto powers = [](const unsigned char* at) {
    return [at](int tile) { return std::ldexp(Real(1), at[tile] - 127); };
  };
  const auto one_scale = [&](int) { return Real(pool.scale); };
  const auto bf16 = [&](const unsigned char* at, int count) {
    for (int c = 0; c < count; ++c) key.push_back(bf16_value(at + 2 * c));
  };
  switch (format) {
    case KvFormat::v32:
      codes(page + offset * 656, 512, 128, floats(page + offset * 656 + 512));
      bf16(page + offset * 656 + 528, 64);
      break;
    case KvFormat::v4:
      codes(page + offset * 576, 448, 64, powers(page + pool.page_size * 576 + offset * 8));
      bf16(page + offset * 576 + 448, 64);
      break;
    case KvFormat::bf16: bf16(page + offset * 1152, 576); break;
    case KvFormat::v41: codes(page + offset * 528, 512, 32, powers(page + offset * 528 + 512)); break;
    case KvFormat::v41plane:
      codes(page + offset * 512, 512, 32, powers(page + pool.page_size * 512 + offset * 16));
      break;
    case KvFormat::v32nope: codes(page + offset * 656, 512, 128, floats(page + offset * 656 + 512)); break;
    case KvFormat::v32nope_compact: codes(page + offset * 528, 512, 128, floats(page + offset * 528 + 512)); break;
    case KvFormat::fp8: codes(page + offset * 576, 576, 576, one_scale); break;
    case KvFormat::fp8nope: codes(page + offset * 512, 512, 512, one_scale); break;
    case KvFormat::bf16nope: bf16(page + offset * 1024, 512); break;
  }
  return key;
}

class BruteForce {
 public:
  explicit BruteForce(const DecodeProblem& problem) : problem_(problem) {
    for (const KvPool* pool : {&problem.kv, &problem.extra_kv}) {
      for (std::int64_t page = 0; page < pool->num_pages; ++page) {
        for (std::int64_t offset = 0; offset < pool->page_size; ++offset) {
          table_.push_back(brute_key(problem.format, *pool, page, offset));
        }
      }
    }
  }

  struct Row {
    std::vector<Real> out;
    Real lse, value_rms;
    std::vector<Real> term_rms;
  };

  Row row(std::int64_t request, std::int64_t query_token, int head) const {
    const std::map<std::int64_t, int> counts = multiplicities(request, query_token);
    Row result{std::vector<Real>(512, 0), -std::numeric_limits<Real>::infinity(), 0, std::vector<Real>(512, 0)};
    if (counts.empty()) return result;

    const std::size_t rope_begin = table_.front().size() - 64;
    const bf16_t* rope = problem_.q_rope + request * problem_.q_rope_stride_b + query_token * problem_.q_rope_stride_s +
                         head * problem_.q_rope_stride_h;
    const bf16_t* q =
        problem_.q + request * problem_.q_stride_b + query_token * problem_.q_stride_s + head * problem_.q_stride_h;
    std::map<std::int64_t, Real> scores;
    Real shift = 0;
    for (const auto& [slot, count] : counts) {
      const std::vector<Real>& key = table_[static_cast<std::size_t>(slot)];
      Real dot = 0;
      for (std::size_t c = key.size(); c-- > 0;)
        dot += bf16_value(reinterpret_cast<const unsigned char*>(c < rope_begin ? q + c : rope + (c - rope_begin))) *
               key[c];
      scores[slot] = dot * Real(problem_.sm_scale);
      shift += scores[slot] / Real(counts.size());
    }
    Real denominator = 0;
    for (const auto& [slot, count] : counts) denominator += count * std::exp(scores[slot] - shift);
    result.lse = std::log(denominator) + shift;

    Real sink_share = 0;
    if (problem_.attn_sink != nullptr) {
      sink_share = std::exp(Real(problem_.attn_sink[head * problem_.attn_sink_stride]) - shift);
    }
    Real square = 0;
    for (std::size_t c = 0; c < 512; ++c) {
      for (const auto& [slot, count] : counts) {
        const Real value = table_[static_cast<std::size_t>(slot)][c];
        const Real weight = count * std::exp(scores[slot] - shift);
        result.out[c] += weight / (denominator + sink_share) * value;
        square += weight / denominator * value * value / 512;
      }
    }
    const Real sink_factor = denominator / (denominator + sink_share);
    result.value_rms = std::sqrt(square) * sink_factor;
    for (std::size_t c = 0; c < 512; ++c) {
      Real without_sink = 0;
      for (const auto& [slot, count] : counts) {
        without_sink +=
            count * std::exp(scores[slot] - shift) / denominator * table_[static_cast<std::size_t>(slot)][c];
      }
      std::map<Real, Real> of_score;
      for (const auto& [slot, count] : counts) {
        const Real value = table_[static_cast<std::size_t>(slot)][c] - without_sink;
        of_score[scores[slot]] += count * std::exp(scores[slot] - shift) / denominator * value;
      }
      for (const auto& [score, term] : of_score) result.term_rms[c] += term * term;
      result.term_rms[c] = std::sqrt(result.term_rms[c]) * sink_factor;
    }
    return result;
  }

 private:
  static std::int32_t length_of(const Selection& selection, std::int64_t request, std::int64_t query_token) {
    return selection.length[request * selection.length_stride_b + query_token * selection.length_stride_s];
  }

  // How often each row of table_ is selected.
  std::map<std::int64_t, int> multiplicities(std::int64_t request, std::int64_t query_token) const {
    std::map<std::int64_t, int> counts;
    std::int64_t first_slot = 0;
    for (const auto& [pool, selection] :
         {std::pair{&problem_.kv, &problem_.selection}, std::pair{&problem_.extra_kv, &problem_.extra_selection}}) {
      const std::int64_t slots = pool->num_pages * pool->page_size;
      for (std::int64_t entry = 0; entry < selection->topk; ++entry) {
        if (selection->length != nullptr && entry >= length_of(*selection, request, query_token)) break;
        const std::int64_t index =
            selection->indices[request * selection->stride_b + query_token * selection->stride_s + entry];
        if (index >= 0 && index < slots) ++counts[first_slot + index];
      }
      first_slot += slots;
    }
    return counts;
  }

  const DecodeProblem& problem_;
  std::vector<std::vector<Real>> table_;
};

}  // namespace chiasma::test
