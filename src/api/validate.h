// From the C structs to validated problems. Every rule that chiasma.h states is checked here, and only here.
#pragma once

#include "api/problem.h"
#include "api/status.h"

namespace chiasma {

// Planning looks at shapes only; running also needs addresses.
enum class DataCheck { shapes_only, with_data };

Status validate_decode(const chiasma_decode_args* args, DataCheck data, DecodeProblem* problem);
Status validate_merge(const chiasma_merge_args* args, MergeProblem* problem);
Status validate_quantize(const chiasma_quantize_args* args, QuantizeProblem* problem);
Status validate_dequantize(const chiasma_dequantize_args* args, DequantizeProblem* problem);
Status validate_gather(const chiasma_gather_args* args, GatherProblem* problem);
Status validate_translate(const chiasma_translate_args* args, TranslateProblem* problem);

// The oracle takes decode arguments whose outputs may be absent.
Status validate_oracle(const chiasma_decode_args* args, DecodeProblem* problem);

bool is_absent(const chiasma_tensor& tensor);
bool is_known_format(chiasma_kv_format format);

}  // namespace chiasma
