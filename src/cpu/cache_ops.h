// The cache operations and merge on the CPU. Results do not depend on the number of threads, and are what
// src/cuda/cache computes, bit for bit.
#pragma once

#include "api/problem.h"

namespace chiasma::cpu {

// Fewer rows than this are not worth waking threads for.
inline constexpr std::int64_t kMinParallelRows = 64;

// Stores rows in a cache. A row whose slot lies outside [0, num_pages * page_size), -1 included, is skipped and not
// counted. Of several rows with one slot the last stays; nonfinite_count counts the others too, as if each had been
// stored in turn. What a format keeps as bf16 is copied bit for bit and counted like the rest; bytes of a scale group
// behind its last scale are set to 0.
void quantize(const QuantizeProblem& problem);

// A value is the float32 product code * scale; bf16 output rounds that. What is stored as bf16 passes unchanged.
void dequantize(const DequantizeProblem& problem);
void gather_dequantize(const GatherProblem& problem);

void translate_indices(const TranslateProblem& problem);

// Parts are added in their order, in float64. A part with lse = -inf is skipped without a look at its out; an lse of
// NaN or +inf makes its row NaN.
void merge(const MergeProblem& problem);

}  // namespace chiasma::cpu
