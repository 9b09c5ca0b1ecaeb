// Quantise, dequantise and merge on the CPU. Results do not depend on the number of threads.
#pragma once

#include "api/problem.h"

namespace chiasma::cpu {

// Stores rows in a v32 or v4 cache. A row whose slot lies outside [0, num_pages * page_size), -1 included, is skipped
// and not counted. Of several rows with one slot the last stays; nonfinite_count counts the others too, as if each had
// been stored in turn. RoPE values are copied bit for bit and counted like the rest; v4's pad byte is set to 0.
void quantize(const QuantizeProblem& problem);

// A value is the float32 product code * scale; bf16 output rounds that. RoPE bits pass unchanged.
void dequantize(const DequantizeProblem& problem);

// Parts are added in their order, in float64. A part with lse = -inf is skipped without a look at its out; an lse of
// NaN or +inf makes its row NaN.
void merge(const MergeProblem& problem);

}  // namespace chiasma::cpu
