// A small legal decode problem whose parts the API tests bend out of shape one at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "chiasma/chiasma.hpp"
#include "format/kv_format.h"

namespace chiasma::test {

// b=2, s_q=3, h_q=4, topk=5, 4 pages of 8 tokens, v32.
struct SmallProblem {
  static constexpr std::int64_t kB = 2, kSq = 3, kHeads = 4, kTopk = 5, kPages = 4, kPage = 8;

  std::vector<std::uint16_t> q = std::vector<std::uint16_t>(kB * kSq * kHeads * 576, 0x3f80);
  std::vector<std::uint8_t> cache_storage = std::vector<std::uint8_t>(kPages * kPage * v32::kRowBytes + 16, 0x38);
  std::vector<std::int32_t> indices = std::vector<std::int32_t>(kB * kSq * kTopk, 3);
  std::vector<std::int32_t> topk_length = std::vector<std::int32_t>(kB, 4);
  std::vector<float> attn_sink = std::vector<float>(kHeads, 0.5f);
  std::vector<std::uint16_t> out = std::vector<std::uint16_t>(kB * kSq * kHeads * 512, 0x7fc0);
  std::vector<float> lse = std::vector<float>(kB * kSq * kHeads, -7.0f);
  chiasma_decode_args args = decode_args(CHIASMA_KV_V32);

  SmallProblem() {
    args.q = tensor(q.data(), CHIASMA_BFLOAT16, kCpu, {kB, kSq, kHeads, 576});
    args.kv_cache = tensor(aligned_cache(), CHIASMA_UINT8, kCpu, {kPages, kPage, 656});
    args.indices = tensor(indices.data(), CHIASMA_INT32, kCpu, {kB, kSq, kTopk});
    args.topk_length = tensor(topk_length.data(), CHIASMA_INT32, kCpu, {kB});
    args.attn_sink = tensor(attn_sink.data(), CHIASMA_FLOAT32, kCpu, {kHeads});
    args.out = tensor(out.data(), CHIASMA_BFLOAT16, kCpu, {kB, kSq, kHeads, 512});
    args.lse = tensor(lse.data(), CHIASMA_FLOAT32, kCpu, {kB, kSq, kHeads});
  }

  std::uint8_t* aligned_cache() {
    const auto address = reinterpret_cast<std::uintptr_t>(cache_storage.data());
    return cache_storage.data() + (16 - address % 16) % 16;
  }
};

}  // namespace chiasma::test
