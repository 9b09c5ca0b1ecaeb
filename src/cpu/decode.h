// Decode on the CPU: SIMD with run-time dispatch, one thread team, caller-owned scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "api/problem.h"

namespace chiasma::cpu {

// How the work is cut. A pure function of shapes; nothing in it but num_threads depends on the machine, and num_threads
// never changes a result.
struct DecodeSchedule {
  std::int64_t tokens_per_split;  // entries of a row (both selections end to end) that one task attends to
  std::int64_t num_splits;        // per row, >= 1
  std::int64_t rows_per_wave;     // rows whose split results are in scratch memory at once; 0: threads take whole rows
  std::int64_t splits_per_wave;   // of each of those rows; 0 with rows_per_wave
  int num_threads;
  std::size_t workspace_bytes;  // < 64 MB
};

// num_splits 0: automatic. num_threads 0: as many as the process may use.
DecodeSchedule schedule_decode(const DecodeProblem& problem, int num_splits, int num_threads);

// workspace: schedule.workspace_bytes, 64-byte aligned or better.
void run_decode(const DecodeProblem& problem, const DecodeSchedule& schedule, void* workspace);

// The instruction set run_decode uses here, such as "AVX2".
std::string simd_target();

}  // namespace chiasma::cpu
