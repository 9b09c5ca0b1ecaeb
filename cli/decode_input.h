// The tensors of a decode call, read from a safetensors file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"
#include "cli/decode_job.h"
#include "cli/safetensors.h"

namespace chiasma::cli {

struct DecodeInputOptions {
  // From the command line; else the file's, as metadata or as a tensor of one number; else the format's default.
  std::optional<double> sm_scale;
  bool cast = false;  // q, q_rope and attn_sink of other dtypes are converted
};

class DecodeInput {
 public:
  // Throws CommandError. `file` must outlive the result.
  DecodeInput(const SafetensorsFile& file, const DecodeInputOptions& options);

  // CPU tensors, the caches where they lie in the file; out and lse are absent.
  const chiasma_decode_args& args() const { return args_; }
  const std::vector<DecodeTensor>& tensors() const { return tensors_; }
  // What the user should know: that a default was taken that fits no model, and what the file has that nobody reads.
  const std::vector<std::string>& notes() const { return notes_; }
  // What was converted because it was asked for.
  const std::vector<std::string>& conversions() const { return conversions_; }
  // q has no dimension of query tokens in the file: [b, h_q, d_qk]. args() has one, of extent 1.
  bool is_flat() const { return is_flat_; }

 private:
  void add(chiasma_tensor chiasma_decode_args::*member, chiasma_tensor tensor, std::span<const std::byte> bytes);
  void add_plain(const std::string& name, Dtype dtype, chiasma_tensor chiasma_decode_args::*member);
  void add_integers(const std::string& name, chiasma_tensor chiasma_decode_args::*member, std::int64_t num_slots);
  void convert(const SafetensorsTensor& tensor, Dtype dtype, chiasma_tensor chiasma_decode_args::*member);
  void unify_shapes();
  void check_query_width() const;
  double choose_sm_scale(std::optional<double> given);
  void find_unused();

  const SafetensorsFile& file_;
  bool cast_;
  bool is_flat_ = false;
  chiasma_decode_args args_{};
  std::vector<DecodeTensor> tensors_;
  std::vector<std::string> notes_, conversions_;
  std::vector<std::vector<std::max_align_t>> copies_;
};

}  // namespace chiasma::cli
