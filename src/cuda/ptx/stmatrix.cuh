// Fragments of matrix products to shared memory. PTX ISA, "stmatrix".
#pragma once

#include <cstdint>

namespace chiasma::ptx {

// Four 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t row_address, const std::uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace chiasma::ptx
