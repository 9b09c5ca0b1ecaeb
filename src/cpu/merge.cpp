#include <algorithm>
#include <limits>

#include "cpu/cache_ops.h"
#include "cpu/threads.h"
#include "format/merge_math.h"
#include "format/numbers.h"

namespace chiasma::cpu {
namespace {

float load_out(const MergeProblem& problem, std::int64_t element) {
  return problem.part_out_is_bf16 ? to_float(static_cast<const bf16_t*>(problem.part_out)[element])
                                  : static_cast<const float*>(problem.part_out)[element];
}

void store_out(const MergeProblem& problem, std::int64_t element, double value) {
  if (problem.out_is_bf16) {
    static_cast<bf16_t*>(problem.out)[element] = to_bf16(exact::to_float32(value));
  } else {
    static_cast<float*>(problem.out)[element] = exact::to_float32(value);
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
    const auto lse = static_cast<double>(part_lse[part * problem.part_lse_stride[0]]);
    return problem.plus_infinity_is_empty && lse == -kEmpty ? kEmpty : lse;
  };

  double max_lse = kEmpty;
  double sum = 0.0;
  double out[kValueDim];
  std::fill_n(out, kValueDim, -0.0);  // WHY: 0.0 + -0.0 would lose the sign that a single part's zero has
  for (std::int64_t part = 0; part < problem.parts; ++part) max_lse = std::max(max_lse, lse_of(part));
  for (std::int64_t part = 0; part < problem.parts; ++part) {
    const double lse = lse_of(part);
    if (lse == kEmpty) continue;
    const double weight = exact::exp(lse - max_lse);
    sum = exact::add(sum, weight);
    const std::int64_t begin = part * problem.part_out_stride[0] + part_out;
    for (int c = 0; c < kValueDim; ++c) {
      out[c] = exact::add(out[c], exact::multiply(weight, static_cast<double>(load_out(problem, begin + c))));
    }
  }

  // With one part that is not empty weight and sum are 1, and both results pass unchanged.
  const bool all_empty = sum == 0.0;
  const double inverse = exact::divide(1.0, sum);
  const std::int64_t out_begin = offset(problem.out_stride);
  for (int c = 0; c < kValueDim; ++c)
    store_out(problem, out_begin + c, all_empty ? 0.0 : exact::multiply(out[c], inverse));
  problem.lse[offset(problem.lse_stride)] =
      exact::to_float32(all_empty ? kEmpty : exact::add(max_lse, exact::log(sum)));
}

}  // namespace

void merge(const MergeProblem& problem) {
  const std::int64_t num_rows = problem.b * problem.s_q * problem.h_q;
#pragma omp parallel num_threads(available_threads()) if (num_rows >= kMinParallelRows)
  {
    const DefaultFloatEnvironment environment;
#pragma omp for
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t query = row / problem.h_q;
      merge_row(problem, query / problem.s_q, query % problem.s_q, row % problem.h_q);
    }
  }
}

}  // namespace chiasma::cpu
