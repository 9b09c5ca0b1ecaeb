// Number conversions and arithmetic that have an instruction of their own. PTX ISA, "cvt", "mul", "ex2", "rcp".
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace chiasma::ptx {

// Four e4m3 codes to four f16, the lowest byte first; exact, NaN codes become NaN. Said at once, since hardware reads
// the upper half of a register as easily as the lower.
__device__ __forceinline__ void e4m3x4_to_half2x2(std::uint32_t codes, std::uint32_t& low, std::uint32_t& high) {
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// Round to nearest even; beyond f16's range becomes infinity.
__device__ __forceinline__ std::uint32_t pack_half2(float low, float high) {
  std::uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
__device__ __forceinline__ std::uint32_t pack_bf162(float low, float high) {
  std::uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// Two f16 times two f16.
__device__ __forceinline__ std::uint32_t multiply_half2(std::uint32_t a, std::uint32_t b) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}

// 2^x with about 2 ulp; -infinity gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// log2 x, absolute error up to 2^-22 near 1, relative elsewhere.
__device__ __forceinline__ float log2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x with 1 ulp, denormals taken for 0.
__device__ __forceinline__ float reciprocal_ftz(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The same, with denormals.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace chiasma::ptx
