// The tensors of a decode call, read from a safetensors file.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"
#include "cli/decode_job.h"
#include "cli/safetensors.h"

namespace chiasma::cli {

// A paged cache as a file holds it.
struct CacheTensor {
  chiasma_kv_format format;
  chiasma_tensor tensor;             // on the CPU, as the C interface wants it
  std::span<const std::byte> bytes;  // of the file, at any address
};

// What the format of `name` is and how its pages lie. metadata "format" decides; without it the dtype and the last
// extent do, where they tell one format. A quantised pool may be 2-D, [num_pages, bytes per page], with the page size
// in metadata `page_key`; this is how pages with padding between them are written. Throws CommandError.
CacheTensor read_cache(const SafetensorsFile& file, const std::string& name, const std::string& page_key);

// metadata "kv_scale" of formats with one scale for the whole cache, else 0. Throws CommandError where it is missing.
double read_kv_scale(const SafetensorsFile& file, chiasma_kv_format format);

class DecodeInput {
 public:
  // sm_scale: from the command line; else the file's, as metadata or as a tensor of one number; else the format's
  // default. Throws CommandError. `file` must outlive the result.
  DecodeInput(const SafetensorsFile& file, std::optional<double> sm_scale);

  // CPU tensors, the caches where they lie in the file; out and lse are absent.
  const chiasma_decode_args& args() const { return args_; }
  const std::vector<DecodeTensor>& tensors() const { return tensors_; }
  // What the user should know: that a default was taken that fits no model, and what the file has that nobody reads.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void add(chiasma_tensor chiasma_decode_args::*member, chiasma_tensor tensor, std::span<const std::byte> bytes);
  void add_plain(const std::string& name, Dtype dtype, chiasma_tensor chiasma_decode_args::*member);
  void add_integers(const std::string& name, chiasma_tensor chiasma_decode_args::*member, std::int64_t num_slots);
  double choose_sm_scale(std::optional<double> given);
  void find_unused();

  const SafetensorsFile& file_;
  chiasma_decode_args args_{};
  std::vector<DecodeTensor> tensors_;
  std::vector<std::string> notes_;
  std::vector<std::vector<std::max_align_t>> copies_;
};

}  // namespace chiasma::cli
