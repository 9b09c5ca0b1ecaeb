// Splits a range over the machine's threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace chiasma::harness {

// body(begin, end) on disjoint ranges that cover [0, count). body must not throw.
template <typename Body>
void parallel_ranges(std::int64_t count, const Body& body) {
  const std::int64_t num_threads =
      std::clamp<std::int64_t>(count, 1, std::max<std::int64_t>(1, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (std::int64_t thread = 1; thread < num_threads; ++thread) {
    threads.emplace_back([&body, thread, num_threads, count] {
      body(count * thread / num_threads, count * (thread + 1) / num_threads);
    });
  }
  body(std::int64_t{0}, count / num_threads);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace chiasma::harness
