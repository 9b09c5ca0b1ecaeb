// Words among the four lanes that share a row of an accumulator tile, so that a lane stores 16 bytes and not four
// times 4.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace chiasma::tile {

// Transposes 4 x 4 words among the four lanes of a quad: lane t ends with word t of every lane, in lane order.
__device__ __forceinline__ uint4 transpose_quad(std::uint32_t w0, std::uint32_t w1, std::uint32_t w2, std::uint32_t w3,
                                                int lane) {
  const bool odd = (lane & 1) != 0;
  const std::uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? w0 : w1, 1);
  const std::uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? w2 : w3, 1);
  const std::uint32_t x0 = odd ? a : w0, x1 = odd ? w1 : a;  // words (0 or 1) of lanes 2i, 2i + 1
  const std::uint32_t x2 = odd ? b : w2, x3 = odd ? w3 : b;
  const bool high = (lane & 2) != 0;
  const std::uint32_t c = __shfl_xor_sync(0xffffffffu, high ? x0 : x2, 2);
  const std::uint32_t d = __shfl_xor_sync(0xffffffffu, high ? x1 : x3, 2);
  return high ? make_uint4(c, d, x2, x3) : make_uint4(x0, x1, c, d);
}

}  // namespace chiasma::tile
