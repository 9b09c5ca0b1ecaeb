// bf16 numbers as they lie in memory, two a word: what the stages that turn them into f16 share.
#pragma once

#include <cstdint>

#include "cuda/ptx/convert.cuh"

namespace chiasma::tile {

// Largest magnitude of each half of eight packed numbers, as bits without sign. Bit patterns of non-negative bf16 order
// like the numbers, also as packed 16-bit integers.
__device__ __forceinline__ std::uint32_t packed_magnitude(const uint4& words) {
  return __vmaxu2(__vmaxu2(words.x & 0x7fff7fffu, words.y & 0x7fff7fffu),
                  __vmaxu2(words.z & 0x7fff7fffu, words.w & 0x7fff7fffu));
}

// The larger half.
__device__ __forceinline__ std::uint32_t larger_half(std::uint32_t packed) {
  return max(packed & 0xffffu, packed >> 16);
}

__device__ __forceinline__ std::uint32_t scaled_half2(std::uint32_t word, float factor) {
  return ptx::pack_half2(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xffff0000u) * factor);
}

// Eight bf16 times a factor, rounded to f16.
__device__ __forceinline__ uint4 scaled_half8(const uint4& words, float factor) {
  return make_uint4(scaled_half2(words.x, factor), scaled_half2(words.y, factor), scaled_half2(words.z, factor),
                    scaled_half2(words.w, factor));
}

}  // namespace chiasma::tile
