// The calls that cache_ops_bench times, each with inputs on a device, the bytes that it has to move and a check of its
// result against the CPU.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "harness/device.h"

namespace chiasma::bench {

struct CacheCase {
  std::string name;
  std::string kernel;
  double bytes = 0;                        // each input read once, each output written once
  std::function<chiasma_status()> launch;  // queues the call on the default stream
  std::function<bool()> is_right;          // after a launch: whether the first rows are what the CPU makes of them
};

// Made when its turn comes, since all together need more memory than a device has. Throws std::runtime_error.
struct CaseMaker {
  std::string name;
  std::function<CacheCase(harness::Device&)> make;
};

std::vector<CaseMaker> cache_cases();

}  // namespace chiasma::bench
