// Stores to global memory. PTX ISA, "st".
#pragma once

namespace chiasma::ptx {

// Four numbers to a multiple of 16 bytes in one instruction; the compiler may split an ordinary assignment of a float4.
__device__ __forceinline__ void store_global_16(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace chiasma::ptx
