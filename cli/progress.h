// A line on stderr that says what a long job is doing, for people only: nothing is shown unless stderr is a terminal
// and the job takes more than a second.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace chiasma::cli {

class Progress {
 public:
  // total 0: how far the job is cannot be told, only the time is shown.
  explicit Progress(std::string what, std::int64_t total = 0);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(std::int64_t done) { done_ += done; }

 private:
  void show();

  const std::string what_;
  const std::int64_t total_;
  std::atomic<std::int64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable finished_condition_;
  bool finished_ = false;
  std::thread thread_;
};

}  // namespace chiasma::cli
