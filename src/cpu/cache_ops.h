// Quantise, dequantise and merge on the CPU.
#pragma once

#include "api/problem.h"

namespace chiasma::cpu {

void quantize(const QuantizeProblem& problem);
void dequantize(const DequantizeProblem& problem);
void merge(const MergeProblem& problem);

}  // namespace chiasma::cpu
