#include "harness/random_case.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "format/kv_format.h"
#include "harness/random.h"

namespace chiasma::harness {
namespace {

// Draws one number after the other.
class Draw {
 public:
  explicit Draw(std::uint64_t key) : key_(key) {}

  std::int64_t up_to(std::int64_t high) {
    return static_cast<std::int64_t>(below(key_, counter_++, static_cast<std::uint64_t>(high) + 1));
  }
  std::int64_t from(std::int64_t low, std::int64_t high) { return low + up_to(high - low); }
  bool one_in(std::int64_t n) { return up_to(n - 1) == 0; }

  template <typename Value, std::size_t kCount>
  Value of(const std::array<Value, kCount>& values) {
    return values[static_cast<std::size_t>(up_to(static_cast<std::int64_t>(kCount) - 1))];
  }

  // Around the sizes where implementations change their ways, or anything.
  std::int64_t size(std::int64_t high) {
    constexpr std::array<std::int64_t, 9> kTurningPoints = {1, 8, 16, 32, 64, 128, 256, 512, 1024};
    if (one_in(3)) return up_to(high);
    return std::clamp<std::int64_t>(of(kTurningPoints) + from(-1, 1), 0, high);
  }

 private:
  std::uint64_t key_;
  std::uint64_t counter_ = 0;
};

constexpr std::array kLengths = {LengthMode::kNone,   LengthMode::kNone, LengthMode::kFull, LengthMode::kRandom,
                                 LengthMode::kRandom, LengthMode::kZero, LengthMode::kRows, LengthMode::kRows};
constexpr std::array<std::int64_t, 10> kPages = {1, 2, 3, 16, 61, 64, 64, 100, 256, 1000};

// So that the oracle has time for many.
void bound_cost(double max_multiply_adds, Case* spec) {
  while (spec->multiply_adds() > max_multiply_adds) {
    if (spec->b > 1) {
      spec->b = (spec->b + 1) / 2;
    } else if (spec->sq > 1) {
      spec->sq = (spec->sq + 1) / 2;
    } else if (spec->topk > 300) {
      spec->topk /= 2;
    } else {
      spec->h = (spec->h + 1) / 2;
    }
  }
}

}  // namespace

Case random_case(std::uint64_t key, double max_multiply_adds) {
  Draw draw(key);
  Case spec;
  spec.seed = key;
  spec.b = draw.one_in(20) ? draw.up_to(100) : draw.from(1, 4);
  spec.sq = draw.one_in(30) ? 0 : draw.from(1, 4);
  spec.h = std::max<std::int64_t>(1, draw.size(128));
  spec.topk = draw.size(2200);
  spec.pool = draw.one_in(30) ? 0 : draw.from(1, draw.one_in(2) ? 40 : 3000);
  spec.page = draw.of(kPages);
  spec.fmt = draw.one_in(3) ? CHIASMA_KV_V32
                            : static_cast<chiasma_kv_format>(
                                  kAllFormats[draw.up_to(static_cast<std::int64_t>(std::size(kAllFormats)) - 1)]);
  const RowTraits traits = traits_of(static_cast<KvFormat>(spec.fmt));
  if (traits.scale_type == ScaleType::float32 && !draw.one_in(4)) spec.scale = CHIASMA_SCALE_AMAX;
  spec.idx = draw.of(std::array{IndexPattern::kRandom, IndexPattern::kRandom, IndexPattern::kSorted,
                                IndexPattern::kWindow, IndexPattern::kSame});
  spec.valid = draw.of(std::array{1.0, 1.0, 0.9, 0.5, 0.1, 0.01, 0.0});
  spec.garbage = draw.one_in(2);
  spec.len = draw.of(kLengths);
  spec.sink = draw.of(std::array{SinkMode::kNone, SinkMode::kNone, SinkMode::kRandom, SinkMode::kRandom,
                                 SinkMode::kZero, SinkMode::kPlusInf, SinkMode::kMinusInf});
  spec.poison = draw.one_in(5) ? Poison::kNone : Poison::kNan;
  spec.layout = draw.of(std::array{Layout::kPacked, Layout::kStrided, Layout::kOdd});
  spec.dist = draw.of(std::array{Distribution::kGauss, Distribution::kGauss, Distribution::kGauss,
                                 Distribution::kOutlier, Distribution::kConst, Distribution::kExtreme});
  spec.qscale = draw.of(std::array{1.0, 1.0, 4.0, 6.0, 11.0, 0.0});
  if (draw.one_in(6)) spec.smscale = draw.of(std::array{0.0, -0.04, 1.0, 1e-20, 1000.0});
  // Scores of usual size from values of any; mostly, since bounds that grow with the scores say little about huge ones.
  if (spec.dist == Distribution::kExtreme && !draw.one_in(4)) spec.smscale = draw.of(std::array{1e-30, -1e-31, 0.0});
  if (draw.one_in(3)) spec.splits = draw.from(1, draw.one_in(4) ? 300 : 9);
  spec.invariant = draw.one_in(4);
  spec.q_pair = draw.one_in(3) && traits.has_rope;
  if (traits.has_second_cache && !draw.one_in(3)) {
    spec.xpool = draw.from(1, 800);
    spec.xtopk = draw.size(600);
    spec.xpage = draw.of(kPages);
    spec.xlen = draw.of(kLengths);
  }
  bound_cost(max_multiply_adds, &spec);
  return spec;
}

}  // namespace chiasma::harness
