// Random numbers as pure functions of (key, counter): the same on every machine and in any order of evaluation. Only
// exact integer and float operations, since the library functions behind std::normal_distribution differ between
// machines.
#pragma once

#include <bit>
#include <cstdint>

namespace chiasma::harness {

// Scrambles 64 bits; a bijection.
constexpr std::uint64_t scramble(std::uint64_t x) {
  // The leading fraction bits of sqrt(2) and sqrt(3), odd: arbitrary multipliers without structure.
  constexpr std::uint64_t kMultiplierA = 0x6a09e667f3bcc909u;
  constexpr std::uint64_t kMultiplierB = 0xbb67ae8584caa73bu;
  x = (x ^ (x >> 32)) * kMultiplierA;
  x = (x ^ (x >> 29)) * kMultiplierB;
  x = (x ^ (x >> 32)) * kMultiplierA;
  return x ^ (x >> 31);
}

// An independent key for each (key, part): chain it to key a stream by several numbers.
constexpr std::uint64_t derive(std::uint64_t key, std::uint64_t part) {
  constexpr std::uint64_t kOddStep = 0x9b05688c2b3e6c1fu;
  return scramble(scramble(key + kOddStep) + part * kOddStep);
}

// Uniform in [0, 1), a multiple of 2^-53.
constexpr double uniform(std::uint64_t key, std::uint64_t counter) {
  return static_cast<double>(derive(key, counter) >> 11) * 0x1p-53;
}

// Uniform in [0, bound); bound >= 1 and far below 2^64, so that the remainder's bias does not matter.
constexpr std::uint64_t below(std::uint64_t key, std::uint64_t counter, std::uint64_t bound) {
  return derive(key, counter) % bound;
}

// Mean 0, standard deviation 1, close to normal, magnitude below 6: the sum of twelve uniform 16-bit numbers.
constexpr float gauss(std::uint64_t key, std::uint64_t counter) {
  std::uint64_t bits = derive(key, counter);
  std::int32_t sum = 0;
  for (int word = 0; word < 3; ++word, bits = scramble(bits + 1)) {
    for (int shift = 0; shift < 64; shift += 16) sum += static_cast<std::int32_t>((bits >> shift) & 0xffffu);
  }
  constexpr std::int32_t kTwiceMean = 12 * 0xffff;
  return static_cast<float>(2 * sum - kTwiceMean) * 0x1p-17f;
}

// A random permutation of [0, n) evaluated at `index`, without a table: a Feistel network on the next even power of
// two, repeated while it lands outside.
constexpr std::uint64_t permute(std::uint64_t index, std::uint64_t n, std::uint64_t key) {
  constexpr int kRounds = 4;
  const int half_bits = (static_cast<int>(std::bit_width(n - 1)) + 1) / 2;
  const std::uint64_t half_mask = (std::uint64_t{1} << half_bits) - 1;
  do {
    std::uint64_t left = index >> half_bits;
    std::uint64_t right = index & half_mask;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ (derive(key + static_cast<std::uint64_t>(round), right) & half_mask);
      left = right;
      right = next;
    }
    index = (left << half_bits) | right;
  } while (index >= n);
  return index;
}

}  // namespace chiasma::harness
