// The tensors a case describes, in host memory, the same on every machine for the same line. A workload is made to
// catch mistakes: pages lie scattered, every byte that must not matter can be NaN, and outputs start out as a NaN
// pattern whose untouched remains are checked after a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chiasma/chiasma.h"
#include "harness/case.h"
#include "harness/host_buffer.h"

namespace chiasma::harness {

// One allocation and the tensor that lives in it. A device path copies whole regions, guard zones included, and keeps
// the tensor's offset from base().
struct Region {
  const char* name;
  chiasma_tensor chiasma_decode_args::*tensor;
  HostBuffer memory;
  bool is_output;

  std::byte* base() const { return memory.data(); }
  std::size_t bytes() const { return memory.size(); }
};

class Workload {
 public:
  // Null on failure, with the reason in *error: a case that is invalid or needs more memory than the machine has.
  static std::unique_ptr<Workload> make(const Case& spec, std::string* error);

  const Case& spec() const { return spec_; }
  // CPU tensors, ready for the C interface. Absent optional tensors are absent.
  const chiasma_decode_args& args() const { return args_; }
  // Writable: tests corrupt a workload to see that it is noticed.
  chiasma_decode_args& args() { return args_; }
  const std::vector<Region>& regions() const { return regions_; }
  std::size_t total_bytes() const;

  // Fills the outputs, their padding and their guard zones with the NaN pattern again.
  void reset_outputs();
  // Whether everything around and between the output elements still holds the pattern; if not, *where says what does
  // not.
  bool guards_intact(std::string* where) const;

 private:
  friend class WorkloadBuilder;
  Workload() = default;

  Case spec_;
  chiasma_decode_args args_{};
  std::vector<Region> regions_;
};

// Slots that query token `row` (request * s_q + query token) of a call on the CPU selects: of the first cache, or of
// the second.
std::vector<std::int64_t> selected_slots(const chiasma_decode_args& args, std::int64_t row, bool extra);

}  // namespace chiasma::harness
