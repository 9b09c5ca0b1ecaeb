// The attention sink: a score that takes probability and gives no value.
#pragma once

#include <cmath>

namespace chiasma::tile {

// exp(lse) / (exp(lse) + exp(sink)), stable for every pair: an infinite sink gives 0 or 1, an empty row (lse =
// -infinity) 0.
__device__ __forceinline__ float sink_multiplier(float lse, float sink) {
  if (lse == -INFINITY) return 0.0f;
  if (sink == -INFINITY) return 1.0f;
  return 1.0f / (1.0f + expf(sink - lse));
}

}  // namespace chiasma::tile
