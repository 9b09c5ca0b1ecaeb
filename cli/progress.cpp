#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

namespace chiasma::cli {
namespace {

constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::chrono::milliseconds kInterval{250};
constexpr const char* kEraseLine = "\r\033[K";

}  // namespace

Progress::Progress(std::string what, std::int64_t total) : what_(std::move(what)), total_(total) {
  if (isatty(STDERR_FILENO) != 0) thread_ = std::thread([this] { show(); });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  finished_condition_.notify_one();
  thread_.join();
}

void Progress::show() {
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  bool shown = false;
  while (!finished_condition_.wait_for(lock, shown ? kInterval : kPatience, [this] { return finished_; })) {
    const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const std::string part = total_ > 0 ? fmt::format(" {}%,", 100 * done_ / total_) : "";
    fmt::print(stderr, "{}{} ...{} {:.0f} s", kEraseLine, what_, part, seconds);
    std::fflush(stderr);
    shown = true;
  }
  if (shown) fmt::print(stderr, "{}", kEraseLine);
}

}  // namespace chiasma::cli
