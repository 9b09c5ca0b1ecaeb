// What a call takes on a cool device and in the long run, and what it draws. A GPU at its power limit lowers its clock,
// so that a loop of seconds measures energy where a short burst measures the kernel; serving lies between the two.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/run.h"

namespace chiasma::harness {

struct EnduranceOptions {
  double pause_seconds = 1.0;      // before each of the two
  double burst_seconds = 0.15;     // then samples of about a millisecond of calls
  double sustained_seconds = 3.0;  // of calls back to back
};

struct Endurance {
  double burst_us = 0;  // a call, mean of the fastest tenth of the burst's samples
  std::int64_t burst_samples = 0;
  double sustained_us = 0;           // a call, mean over the second half of the sustained run
  std::int64_t sustained_calls = 0;  // in that half
  // Of that half; absent where the device has no meters.
  std::optional<double> sm_mhz, watts, joules_a_call;
  std::vector<std::string> clock_event_reasons;  // seen at any time in it
};

// False with *error set when a run fails.
bool measure_endurance(Runner& runner, const EnduranceOptions& options, Endurance* result, RunError* error);

}  // namespace chiasma::harness
