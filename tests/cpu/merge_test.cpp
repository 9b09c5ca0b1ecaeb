// Merging partial results: exact identities, and equality with attention that was never divided.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/cache_ops.h"
#include "cpu/oracle.h"
#include "tests/cpu/random_problem.h"

namespace chiasma::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Parts of b = 2, s_q = 3, h_q = 2 with gaps between all dimensions. Out is float32 or bf16 bits.
template <typename Out>
class Merge {
 public:
  static constexpr std::int64_t kB = 2, kS = 3, kH = 2;
  static constexpr std::int64_t kRows = kB * kS * kH;

  bool plus_infinity_is_empty = false;

  explicit Merge(std::int64_t parts) : parts_(parts) {
    part_out_.assign(static_cast<std::size_t>(parts * part_out_stride_[0]), from_float(kNan));
    part_lse_.assign(static_cast<std::size_t>(parts * part_lse_stride_[0]), kNan);
    out_.assign(static_cast<std::size_t>(kB * out_stride_[0]), from_float(kFiller));
    lse_.assign(static_cast<std::size_t>(kB * lse_stride_[0]), kFiller);
  }

  void run() {
    MergeProblem problem{};
    problem.parts = parts_;
    problem.b = kB;
    problem.s_q = kS;
    problem.h_q = kH;
    problem.part_out = part_out_.data();
    problem.part_lse = part_lse_.data();
    problem.out = out_.data();
    problem.lse = lse_.data();
    problem.part_out_is_bf16 = problem.out_is_bf16 = sizeof(Out) == 2;
    problem.plus_infinity_is_empty = plus_infinity_is_empty;
    std::copy_n(part_out_stride_, 4, problem.part_out_stride);
    std::copy_n(part_lse_stride_, 4, problem.part_lse_stride);
    std::copy_n(out_stride_, 3, problem.out_stride);
    std::copy_n(lse_stride_, 3, problem.lse_stride);
    cpu::merge(problem);
  }

  Out* part_out(std::int64_t part, std::int64_t row) {
    return part_out_.data() + part * part_out_stride_[0] + offset(row, part_out_stride_ + 1);
  }
  float& part_lse(std::int64_t part, std::int64_t row) {
    return part_lse_[static_cast<std::size_t>(part * part_lse_stride_[0] + offset(row, part_lse_stride_ + 1))];
  }
  Out* out(std::int64_t row) { return out_.data() + offset(row, out_stride_); }
  float lse(std::int64_t row) { return lse_[static_cast<std::size_t>(offset(row, lse_stride_))]; }

  // Numbers written: everything else in out and lse still holds the filler.
  std::int64_t num_written() {
    std::int64_t count = 0;
    for (const Out& value : out_) count += to_float32(value) != kFiller;
    for (const float value : lse_) count += value != kFiller;
    return count;
  }

  static Out from_float(float value) {
    if constexpr (sizeof(Out) == 2)
      return to_bf16(value);
    else
      return value;
  }
  static float to_float32(Out value) {
    if constexpr (sizeof(Out) == 2)
      return to_float(value);
    else
      return value;
  }

 private:
  static constexpr float kFiller = -98304.0f;
  static std::int64_t offset(std::int64_t row, const std::int64_t* stride) {
    return row / (kS * kH) * stride[0] + row / kH % kS * stride[1] + row % kH * stride[2];
  }
  std::int64_t parts_;
  std::int64_t out_stride_[3] = {kS * (kH * 520 + 3) + 7, kH * 520 + 3, 520};
  std::int64_t lse_stride_[3] = {2 * (kS * 3 + 1), 3, 1};
  std::int64_t part_out_stride_[4] = {kB * (kS * kH * 514 + 5) + 9, kS* kH * 514 + 5, kH * 514, 514};
  std::int64_t part_lse_stride_[4] = {kB * kS * kH * 2, 2 * kS* kH, 2 * kH, 2};
  std::vector<Out> part_out_, out_;
  std::vector<float> part_lse_, lse_;
};

template <typename Out>
class MergeTyped : public testing::Test {};
using OutTypes = testing::Types<float, bf16_t>;
TYPED_TEST_SUITE(MergeTyped, OutTypes);

// One part holds the result, the others are empty with NaN in their out: bits pass unchanged, the sign of zero too.
TYPED_TEST(MergeTyped, EmptyPartsAreAnExactIdentity) {
  using M = Merge<TypeParam>;
  std::mt19937 random(1);
  for (std::int64_t full = 0; full < 4; ++full) {
    M merge(4);
    for (std::int64_t row = 0; row < M::kRows; ++row) {
      for (std::int64_t part = 0; part < 4; ++part) merge.part_lse(part, row) = -kInfinity;
      merge.part_lse(full, row) = std::normal_distribution<float>(0.0f, 100.0f)(random);
      for (int c = 0; c < kValueDim; ++c) {
        merge.part_out(full, row)[c] = M::from_float(std::normal_distribution<float>(0.0f, 1e3f)(random));
      }
      merge.part_out(full, row)[9] = M::from_float(-0.0f);
    }
    merge.run();
    for (std::int64_t row = 0; row < M::kRows; ++row) {
      EXPECT_EQ(std::memcmp(merge.out(row), merge.part_out(full, row), kValueDim * sizeof(TypeParam)), 0);
      EXPECT_EQ(merge.lse(row), merge.part_lse(full, row));
    }
    EXPECT_EQ(merge.num_written(), M::kRows * (kValueDim + 1));
  }
}

TYPED_TEST(MergeTyped, AllEmptyIsEmpty) {
  using M = Merge<TypeParam>;
  M merge(3);
  for (std::int64_t row = 0; row < M::kRows; ++row) {
    for (std::int64_t part = 0; part < 3; ++part) merge.part_lse(part, row) = -kInfinity;
  }
  merge.run();
  for (std::int64_t row = 0; row < M::kRows; ++row) {
    EXPECT_EQ(merge.lse(row), -kInfinity);
    for (int c = 0; c < kValueDim; ++c) {
      EXPECT_EQ(M::to_float32(merge.out(row)[c]), 0.0f);
      EXPECT_FALSE(std::signbit(M::to_float32(merge.out(row)[c])));
    }
  }
}

// Kernels differ in the lse of an empty part. Told so, +infinity is what -infinity is; untold, it is no number.
TYPED_TEST(MergeTyped, PlusInfinityIsEmptyWhereAsked) {
  using M = Merge<TypeParam>;
  for (const bool is_empty : {false, true}) {
    M merge(3);
    merge.plus_infinity_is_empty = is_empty;
    for (std::int64_t row = 0; row < M::kRows; ++row) {
      merge.part_lse(0, row) = kInfinity;
      merge.part_lse(1, row) = row == 0 ? kInfinity : 3.5f;
      merge.part_lse(2, row) = -kInfinity;
      std::fill_n(merge.part_out(1, row), kValueDim, M::from_float(-7.0f));
    }
    merge.run();
    for (std::int64_t row = 0; row < M::kRows; ++row) {
      const float out = M::to_float32(merge.out(row)[row]);
      if (!is_empty) {
        EXPECT_TRUE(std::isnan(out) && std::isnan(merge.lse(row)));
        continue;
      }
      EXPECT_EQ(out, row == 0 ? 0.0f : -7.0f);
      EXPECT_EQ(merge.lse(row), row == 0 ? -kInfinity : 3.5f);
    }
  }
}

// Z = {2, 8} and outputs {0, 10} make 8.
TYPED_TEST(MergeTyped, WeighsBySumsOfExponentials) {
  using M = Merge<TypeParam>;
  M merge(2);
  for (std::int64_t row = 0; row < M::kRows; ++row) {
    merge.part_lse(0, row) = std::log(2.0f);
    merge.part_lse(1, row) = std::log(8.0f);
    std::fill_n(merge.part_out(0, row), kValueDim, M::from_float(0.0f));
    std::fill_n(merge.part_out(1, row), kValueDim, M::from_float(10.0f));
  }
  merge.run();
  for (std::int64_t row = 0; row < M::kRows; ++row) {
    EXPECT_NEAR(merge.lse(row), std::log(10.0f), 3e-7f);
    for (int c = 0; c < kValueDim; ++c) EXPECT_NEAR(M::to_float32(merge.out(row)[c]), 8.0f, 2e-6f);
  }
}

// Sums of exponentials that no float64 holds.
TEST(MergeNumerics, LargeAndSmallLseDoNotOverflow) {
  for (const float base : {3e4f, -3e4f, 1e30f, -1e30f}) {
    Merge<float> merge(2);
    for (std::int64_t row = 0; row < Merge<float>::kRows; ++row) {
      merge.part_lse(0, row) = merge.part_lse(1, row) = base;
      std::fill_n(merge.part_out(0, row), kValueDim, 1.0f);
      std::fill_n(merge.part_out(1, row), kValueDim, 4.0f);
    }
    merge.run();
    EXPECT_EQ(merge.out(0)[0], 2.5f);
    EXPECT_EQ(merge.lse(0), static_cast<float>(static_cast<double>(base) + std::log(2.0)));
  }
}

TEST(MergeNumerics, NanStaysInItsRow) {
  Merge<float> merge(2);
  for (std::int64_t row = 0; row < Merge<float>::kRows; ++row) {
    for (std::int64_t part = 0; part < 2; ++part) {
      merge.part_lse(part, row) = 0.0f;
      std::fill_n(merge.part_out(part, row), kValueDim, 1.0f);
    }
  }
  merge.part_lse(1, 4) = kNan;
  merge.run();
  for (std::int64_t row = 0; row < Merge<float>::kRows; ++row) {
    EXPECT_EQ(std::isnan(merge.lse(row)), row == 4);
    EXPECT_EQ(std::isnan(merge.out(row)[0]), row == 4);
  }
}

struct Parts {
  std::vector<std::vector<double>> out, lse;  // of each part
  std::vector<double> whole_out, whole_lse;
};

// Attention over all entries and over runs of them, by the oracle; some parts are empty.
Parts divide(std::int64_t num_parts, std::uint64_t seed) {
  ProblemShape shape;
  shape.b = Merge<float>::kB;
  shape.s_q = Merge<float>::kS;
  shape.h_q = static_cast<int>(Merge<float>::kH);
  shape.topk = 60;
  shape.page_size = 61;
  shape.valid = 0.6f;
  const RandomProblem random_problem(shape, seed);
  const std::size_t heads = static_cast<std::size_t>(Merge<float>::kRows);
  const std::vector<std::int64_t> rows = {0, 1, 2, 3, 4, 5};
  const auto oracle = [&](std::int64_t first, std::int64_t count, std::vector<double>& out, std::vector<double>& lse) {
    DecodeProblem problem = random_problem.problem;
    problem.selection.indices += first;
    problem.selection.topk = count;
    out.resize(heads * kValueDim);
    lse.resize(heads);
    cpu::decode_oracle(problem, rows.data(), 6, out.data(), lse.data(), nullptr);
  };
  Parts parts{std::vector<std::vector<double>>(static_cast<std::size_t>(num_parts)),
              std::vector<std::vector<double>>(static_cast<std::size_t>(num_parts)),
              {},
              {}};
  oracle(0, shape.topk, parts.whole_out, parts.whole_lse);
  std::int64_t first = 0;
  for (std::int64_t part = 0; part < num_parts; ++part) {
    // Every third part gets nothing; the last takes what is left.
    const std::int64_t rest = shape.topk - first;
    const std::int64_t count = part + 1 == num_parts ? rest : part % 3 == 2 ? 0 : std::min<std::int64_t>(rest, 7);
    oracle(first, count, parts.out[static_cast<std::size_t>(part)], parts.lse[static_cast<std::size_t>(part)]);
    first += count;
  }
  return parts;
}

TEST(MergeNumerics, EqualsUndividedAttentionInAnyOrderOfParts) {
  for (const std::int64_t num_parts : {1, 2, 5, 8}) {
    const Parts parts = divide(num_parts, static_cast<std::uint64_t>(num_parts));
    for (const bool reversed : {false, true}) {
      Merge<float> merge(num_parts);
      for (std::int64_t part = 0; part < num_parts; ++part) {
        const std::size_t from = static_cast<std::size_t>(reversed ? num_parts - 1 - part : part);
        for (std::int64_t row = 0; row < Merge<float>::kRows; ++row) {
          merge.part_lse(part, row) = static_cast<float>(parts.lse[from][static_cast<std::size_t>(row)]);
          for (int c = 0; c < kValueDim; ++c) {
            merge.part_out(part, row)[c] =
                static_cast<float>(parts.out[from][static_cast<std::size_t>(row * kValueDim + c)]);
          }
        }
      }
      merge.run();
      for (std::int64_t row = 0; row < Merge<float>::kRows; ++row) {
        EXPECT_NEAR(merge.lse(row), parts.whole_lse[static_cast<std::size_t>(row)], 2e-6);
        for (int c = 0; c < kValueDim; ++c) {
          // Values reach some tens; each lse was rounded to float32, which moves weights by some 1e-6.
          ASSERT_NEAR(merge.out(row)[c], parts.whole_out[static_cast<std::size_t>(row * kValueDim + c)], 5e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace chiasma::test
