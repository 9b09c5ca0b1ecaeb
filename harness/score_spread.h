// How far the scores of a query token spread. Rounding a key moves a score in proportion, so error bounds must know.
#pragma once

#include <cstdint>
#include <vector>

#include "chiasma/chiasma.h"

namespace chiasma::harness {

class ScoreSpread {
 public:
  // Looks at a sample of the selected keys of query token `row` (request * s_q + query token).
  ScoreSpread(const chiasma_decode_args& args, std::int64_t row);

  // The standard deviation of the head's scores over the keys, or the one that their products would have with
  // random signs, whichever is larger: the second is what counts when few keys happen to score alike.
  double deviation(std::int64_t head) const { return deviation_[static_cast<std::size_t>(head)]; }
  // Entries that count, of both caches.
  std::int64_t num_selected() const { return num_selected_; }

 private:
  std::vector<double> deviation_;
  std::int64_t num_selected_ = 0;
};

}  // namespace chiasma::harness
