#include "cpu/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/kv_rows.h"
#include "cpu/threads.h"

namespace chiasma::cpu {
namespace {

// Appends the keys of every valid entry that one query token selects from one pool, in the order of its indices.
void append_selected_keys(KvFormat format, const KvPool& pool, const Selection& selection, std::int64_t request,
                          std::int64_t query_token, std::vector<double>& keys) {
  std::int64_t num_entries = selection.topk;
  if (selection.length != nullptr) {
    const std::int64_t length =
        selection.length[request * selection.length_stride_b + query_token * selection.length_stride_s];
    num_entries = std::clamp(length, std::int64_t{0}, selection.topk);
  }
  for (std::int64_t entry = 0; entry < num_entries; ++entry) {
    const std::int64_t slot =
        selection.indices[request * selection.stride_b + query_token * selection.stride_s + entry];
    if (slot < 0 || slot >= pool.num_slots()) continue;
    const std::size_t begin = keys.size();
    keys.resize(begin + static_cast<std::size_t>(key_dim(format)));
    load_key(format, pool, slot, keys.data() + begin);
  }
}

// One head's query, [key_dim(format)], RoPE last.
void load_query(const DecodeProblem& problem, std::int64_t request, std::int64_t query_token, std::int64_t head,
                double* query) {
  const int rope_begin = key_dim(problem.format) - kRopeDim;
  const bf16_t* q =
      problem.q + request * problem.q_stride_b + query_token * problem.q_stride_s + head * problem.q_stride_h;
  const bf16_t* rope = problem.q_rope + request * problem.q_rope_stride_b + query_token * problem.q_rope_stride_s +
                       head * problem.q_rope_stride_h;
  for (int c = 0; c < rope_begin; ++c) query[c] = to_float(q[c]);
  for (int c = 0; c < kRopeDim; ++c) query[rope_begin + c] = to_float(rope[c]);
}

struct HeadResult {
  double* out;  // [kValueDim]
  double* lse;
  double* value_rms;  // or null
  double* term_rms;   // [kValueDim], or null
};

// Of the terms that the row of out (still without its sink) is a sum of. Tokens of equal score are one term, since
// whatever rounds their probabilities rounds them alike.
void add_term_rms(const double* keys, int dim, std::int64_t num_keys, const double* scores, const HeadResult& result) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(num_keys));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  // NaN in front, so that the order is one.
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return std::isnan(scores[a]) != std::isnan(scores[b]) ? std::isnan(scores[a]) : scores[a] < scores[b];
  });
  std::vector<double> term(kValueDim, 0.0);
  for (std::size_t n = 0; n < order.size(); ++n) {
    const std::int64_t t = order[n];
    const double probability = std::exp(scores[t] - *result.lse);
    for (int c = 0; c < kValueDim; ++c) {
      term[static_cast<std::size_t>(c)] += probability * (keys[t * dim + c] - result.out[c]);
    }
    if (n + 1 < order.size() && scores[order[n + 1]] == scores[t]) continue;
    for (int c = 0; c < kValueDim; ++c) {
      double& of_column = term[static_cast<std::size_t>(c)];
      result.term_rms[c] += of_column * of_column;
      of_column = 0.0;
    }
  }
  for (int c = 0; c < kValueDim; ++c) result.term_rms[c] = std::sqrt(result.term_rms[c]);
}

// softmax(sm_scale * q . K) . V for one head over `num_keys` keys; scores is scratch of num_keys.
void attend(const double* q, int dim, double sm_scale, const double* keys, std::int64_t num_keys, const float* sink,
            double* scores, const HeadResult& result) {
  std::fill_n(result.out, kValueDim, 0.0);
  *result.lse = -std::numeric_limits<double>::infinity();
  if (result.value_rms != nullptr) *result.value_rms = 0.0;
  if (result.term_rms != nullptr) std::fill_n(result.term_rms, kValueDim, 0.0);
  if (num_keys == 0) return;

  for (std::int64_t t = 0; t < num_keys; ++t) {
    double dot = 0.0;
    for (int c = 0; c < dim; ++c) dot += q[c] * keys[t * dim + c];
    scores[t] = sm_scale * dot;
  }

  const double max_score = *std::max_element(scores, scores + num_keys);
  double sum = 0.0;
  for (std::int64_t t = 0; t < num_keys; ++t) sum += std::exp(scores[t] - max_score);
  *result.lse = max_score + std::log(sum);

  double mean_square = 0.0;
  for (std::int64_t t = 0; t < num_keys; ++t) {
    const double probability = std::exp(scores[t] - max_score) / sum;
    const double* value = keys + t * dim;
    double square = 0.0;
    for (int c = 0; c < kValueDim; ++c) {
      result.out[c] += probability * value[c];
      square += value[c] * value[c];
    }
    mean_square += probability * square / kValueDim;
  }

  // exp(lse) / (exp(lse) + exp(sink)), divided through by exp(lse) so that neither overflows.
  const double factor = sink == nullptr ? 1.0 : 1.0 / (1.0 + std::exp(static_cast<double>(*sink) - *result.lse));
  if (result.term_rms != nullptr) {
    add_term_rms(keys, dim, num_keys, scores, result);
    for (int c = 0; c < kValueDim; ++c) result.term_rms[c] *= factor;
  }
  for (int c = 0; c < kValueDim; ++c) result.out[c] *= factor;
  if (result.value_rms != nullptr) *result.value_rms = factor * std::sqrt(mean_square);
}

}  // namespace

void decode_oracle(const DecodeProblem& problem, const std::int64_t* rows, std::int64_t num_rows, double* out,
                   double* lse, double* value_rms, double* term_rms) {
  const DefaultFloatEnvironment callers_environment;
  const int dim = key_dim(problem.format);
  std::vector<double> keys;
  std::vector<double> scores;
  for (std::int64_t n = 0; n < num_rows; ++n) {
    const std::int64_t request = rows[n] / problem.s_q;
    const std::int64_t query_token = rows[n] % problem.s_q;
    keys.clear();
    append_selected_keys(problem.format, problem.kv, problem.selection, request, query_token, keys);
    append_selected_keys(problem.format, problem.extra_kv, problem.extra_selection, request, query_token, keys);
    const std::int64_t num_keys = static_cast<std::int64_t>(keys.size()) / dim;
    scores.resize(static_cast<std::size_t>(num_keys * problem.h_q));

#pragma omp parallel num_threads(available_threads())
    {
      const DefaultFloatEnvironment environment;
#pragma omp for
      for (int head = 0; head < problem.h_q; ++head) {
        double q[kMaxKeyDim];
        load_query(problem, request, query_token, head, q);
        const float* sink =
            problem.attn_sink == nullptr ? nullptr : problem.attn_sink + head * problem.attn_sink_stride;
        const std::int64_t result = n * problem.h_q + head;
        attend(q, dim, problem.sm_scale, keys.data(), num_keys, sink, scores.data() + head * num_keys,
               {.out = out + result * kValueDim,
                .lse = lse + result,
                .value_rms = value_rms == nullptr ? nullptr : value_rms + result,
                .term_rms = term_rms == nullptr ? nullptr : term_rms + result * kValueDim});
      }
    }
  }
}

}  // namespace chiasma::cpu
