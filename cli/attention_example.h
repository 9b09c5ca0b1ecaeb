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

struct CacheKind {
  chiasma_kv_format format = CHIASMA_KV_V32;
  chiasma_scale_mode scale = CHIASMA_SCALE_POW2;
};

struct ExampleResult {
  std::string kernel;
  double milliseconds = 0;            // of one decode call, the median of several
  harness::CheckReport kernel_error;  // the decoded results against the oracle over the quantised cache
  // The oracle over the quantised cache against the oracle over the bf16 one: relative L2 of a head's output.
  double quantisation_mean = 0, quantisation_max = 0;
};

// Quantises, decodes on `device` (kernel: empty for the best that fits), compares. Formats of 512 columns take the last
// 512, or the first where they have no rotary ones; a scale for the whole cache is the largest magnitude over 448.
// Throws CommandError.
ExampleResult work_through(const AttentionExample& example, CacheKind kind, harness::Device& device,
                           const std::string& kernel = {});

}  // namespace chiasma::cli
