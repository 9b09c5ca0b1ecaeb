// Work that a device does in order, beside other queues: a CUDA stream, with what it takes to drive ten thousand runs
// and compare each result without copying it to the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace chiasma::harness {

// Recorded work (a CUDA graph).
class Recording {
 public:
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  virtual ~Recording() = default;
};

class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  virtual ~Queue() = default;

  // For chiasma_decode_run(). Never the default stream, and not ordered with it.
  virtual void* stream() const = 0;

  // These return at once; what goes wrong shows in synchronize(). Memory of the queue's device.
  virtual void fill(std::byte* to, int value, std::size_t bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  // Adds the number of 4-byte words that differ to a counter of this queue. Pointers are multiples of 16, bytes of 4.
  virtual void count_differences(const std::byte* a, const std::byte* b, std::size_t bytes) = 0;
  // Nothing queued later starts before release().
  virtual void hold() = 0;
  virtual void release() = 0;

  // Runs `work`, which queues on this queue and returns whether that succeeded, without anything being executed. Null
  // on failure.
  virtual std::unique_ptr<Recording> record(const std::function<bool()>& work, std::string* error) = 0;
  virtual void replay(const Recording& recording) = 0;

  // Waits. False with the first failure since the last call.
  virtual bool synchronize(std::string* error) = 0;
  // Waits, returns the counter and sets it to 0; -1 on failure.
  virtual std::int64_t take_differences(std::string* error) = 0;
};

}  // namespace chiasma::harness
