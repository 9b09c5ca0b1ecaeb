// Host memory straight from the operating system: page aligned, zero until touched, so that huge sparse pools cost only
// what is used of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chiasma::harness {

class HostBuffer {
 public:
  HostBuffer() = default;
  // data() is null when the system refuses or bytes is 0.
  explicit HostBuffer(std::size_t bytes);
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Bytes that can be used now without swapping, as the system estimates.
std::int64_t available_memory_bytes();

}  // namespace chiasma::harness
