#include "harness/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace chiasma::harness {
namespace {

// A sample of back-to-back calls lasts at least this long, so that starting and stopping the clock does not show.
constexpr double kMinLoopSampleUs = 1000.0;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// One runner's samples while they are taken.
struct Record {
  Runner* runner;
  std::vector<double> cold, loop;
  std::int64_t calls = 1;  // of a loop sample
};

// Microseconds per call; negative after a failure.
double timed(Record& record, std::int64_t calls, RunError* error) {
  bool ok = true;
  const double total = record.runner->device().time_us([&] {
    for (std::int64_t n = 0; n < calls && ok; ++n) ok = record.runner->launch(error);
  });
  return ok ? total / static_cast<double>(calls) : -1.0;
}

bool warm_up(Record& record, const TimingOptions& options, RunError* error) {
  if (timed(record, std::max<std::int64_t>(1, options.warmup_calls), error) < 0) return false;
  const double one_call = timed(record, 1, error);
  if (one_call < 0) return false;
  record.calls = std::max<std::int64_t>(1, std::llround(std::ceil(kMinLoopSampleUs / std::max(one_call, 0.1))));
  return true;
}

bool take_samples(Record& record, RunError* error) {
  record.runner->device().flush_caches();
  const double cold = timed(record, 1, error);
  // The call that was just made is the loop's warm-up.
  const double loop = cold < 0 ? -1.0 : timed(record, record.calls, error);
  if (loop < 0) return false;
  record.cold.push_back(cold);
  record.loop.push_back(loop);
  return true;
}

}  // namespace

Statistics summarize(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::sort(samples.begin(), samples.end());
  const auto percentile = [&](double fraction) {
    const double position = fraction * static_cast<double>(samples.size() - 1);
    const auto below = static_cast<std::size_t>(position);
    const std::size_t above = std::min(below + 1, samples.size() - 1);
    return samples[below] + (position - static_cast<double>(below)) * (samples[above] - samples[below]);
  };
  return {percentile(0.5), samples.front(), percentile(0.1), percentile(0.9),
          static_cast<std::int64_t>(samples.size())};
}

bool time_runners(const std::vector<Runner*>& runners, const TimingOptions& options, std::vector<Timing>* results,
                  RunError* error) {
  results->clear();
  if (runners.empty()) return true;
  const Device& device = runners.front()->device();
  std::vector<Record> records;
  records.reserve(runners.size());
  for (Runner* runner : runners) records.push_back({runner, {}, {}, 1});
  for (Record& record : records) {
    if (!warm_up(record, options, error)) return false;
  }
  const auto sensors_before = device.sensors();
  const Clock::time_point begin = Clock::now();
  const double limit = options.seconds_per_runner * static_cast<double>(runners.size());
  for (std::int64_t round = 0; round < options.max_samples; ++round) {
    if (round >= options.min_samples && seconds_since(begin) > limit) break;
    for (Record& record : records) {
      if (!take_samples(record, error)) return false;
    }
  }
  const auto sensors_after = device.sensors();
  for (const Record& record : records) {
    results->push_back({summarize(record.cold), summarize(record.loop), record.calls, sensors_before, sensors_after});
  }
  return true;
}

}  // namespace chiasma::harness
