// Attention over unquantised tensors, worked through: quantise, decode, compare with the oracle, and tell the kernel's
// error from the one that quantisation makes. For `chiasma demo` and the tests with real activations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"
#include "cli/safetensors.h"
#include "format/numbers.h"
#include "harness/check.h"
#include "harness/device.h"

namespace chiasma::cli {

struct AttentionExample {
  std::string name;
  double sm_scale = 0;
  std::vector<std::int64_t> q_shape, kv_shape, indices_shape;  // of rank 4, 3, 3
  std::vector<bf16_t> q;                                       // [b, s_q, h_q, 576]
  std::vector<bf16_t> kv;                                      // [num_pages, page, 576]
  std::vector<std::int32_t> indices;                           // [b, s_q, topk]
};

// From a file with q, kv, indices and the metadata sm_scale. Throws CommandError.
AttentionExample load_example(const SafetensorsFile& file, std::string name);

// The excerpt that is part of this program.
AttentionExample real_example();

// Normally distributed, with indices scattered over the whole cache and a tenth of them masked.
AttentionExample random_example();

struct ExampleResult {
  std::string kernel;
  double milliseconds = 0;            // of one decode call, the median of several
  harness::CheckReport kernel_error;  // the decoded results against the oracle over the quantised cache
  // The oracle over the quantised cache against the oracle over the bf16 one: relative L2 of a head's output.
  double quantisation_mean = 0, quantisation_max = 0;
};

// Quantises to v32, decodes on `device` (kernel: empty for the best that fits), compares. Throws CommandError.
ExampleResult work_through(const AttentionExample& example, chiasma_scale_mode scale, harness::Device& device,
                           const std::string& kernel = {});

}  // namespace chiasma::cli
