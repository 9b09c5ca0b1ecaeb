// A paged cache for tests: pages lie apart, and every byte that is no page, before, between and after, holds a guard
// pattern that can be checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "api/problem.h"

namespace chiasma::test {

class PagedCache {
 public:
  // gap_bytes (a multiple of 16) lie between one page's last byte, rounded up to 16, and the next page.
  PagedCache(KvFormat format, std::int64_t num_pages, std::int64_t page_size, std::int64_t gap_bytes = 0)
      : page_bytes_(min_page_bytes(format, static_cast<int>(page_size))),
        stride_((page_bytes_ + 15) / 16 * 16 + gap_bytes),
        num_pages_(num_pages),
        page_size_(page_size),
        storage_(static_cast<std::size_t>(num_pages * stride_ / 16 + 2 * kGuardBlocks)) {
    for (Block& block : storage_) std::fill(block.bytes, block.bytes + 16, kGuard);
  }

  std::byte* data() { return (storage_.data() + kGuardBlocks)->bytes; }
  std::byte* page(std::int64_t number) { return data() + number * stride_; }
  std::int64_t page_bytes() const { return page_bytes_; }
  std::int64_t stride() const { return stride_; }
  std::int64_t num_pages() const { return num_pages_; }
  std::int64_t page_size() const { return page_size_; }
  std::int64_t num_slots() const { return num_pages_ * page_size_; }
  KvPool pool() { return {data(), stride_, num_pages_, page_size_, 1.0f}; }

  void fill(std::uint8_t value) {
    for (std::int64_t p = 0; p < num_pages_; ++p) std::fill_n(page(p), page_bytes_, std::byte{value});
  }

  bool guards_intact() {
    const auto* begin = reinterpret_cast<const std::byte*>(storage_.data());
    const std::byte* end = begin + storage_.size() * sizeof(Block);
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    if (!std::all_of(begin, static_cast<const std::byte*>(data()), is_guard)) return false;
    for (std::int64_t p = 0; p < num_pages_; ++p) {
      const std::byte* gap = page(p) + page_bytes_;
      const std::byte* gap_end = p + 1 < num_pages_ ? page(p + 1) : end;
      if (!std::all_of(gap, gap_end, is_guard)) return false;
    }
    return true;
  }

 private:
  struct alignas(16) Block {
    std::byte bytes[16];
  };
  static constexpr std::byte kGuard{0xa5};
  static constexpr std::int64_t kGuardBlocks = 64;

  std::int64_t page_bytes_, stride_, num_pages_, page_size_;
  std::vector<Block> storage_;
};

inline bf16_t random_bf16(std::mt19937& random, float deviation) {
  return to_bf16(std::normal_distribution<float>(0.0f, deviation)(random));
}

}  // namespace chiasma::test
