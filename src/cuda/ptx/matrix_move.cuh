// 8 x 8 matrices of 16-bit numbers between shared memory and registers as the tensor cores have them: lane l holds word
// l % 4 of row l / 4. Lanes 8 m to 8 m + 7 give the addresses of the eight 16-byte rows of matrix m. PTX ISA,
// "ldmatrix", "stmatrix".
#pragma once

#include <cstdint>

namespace chiasma::ptx {

__device__ __forceinline__ uint4 ldmatrix_x4(std::uint32_t address) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(address)
               : "memory");
  return m;
}

__device__ __forceinline__ void stmatrix_x2(std::uint32_t address, std::uint32_t m0, std::uint32_t m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(m0), "r"(m1) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(std::uint32_t address, std::uint32_t m0, std::uint32_t m1, std::uint32_t m2,
                                            std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace chiasma::ptx
