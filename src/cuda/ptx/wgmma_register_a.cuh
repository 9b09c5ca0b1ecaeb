// Warpgroup matrix products whose left operand lies in registers: d [64, N] (+)= a [64, 16] b [16, N], float32
// accumulation, N = 8, 16, 32 or 64. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". The rules of
// wgmma.cuh hold; a's registers, too, must not be touched until the product is retired.
#pragma once

#include <cstdint>

namespace chiasma::ptx {

enum class Operand { f16, bf16 };
// How b lies in shared memory: rows of N along the contraction, or rows of the contraction along N.
enum class RightLayout { k_major = 0, mn_major = 1 };

// One accumulator tile: [4 j + 2 r + c] is row 16 warp + lane / 4 + 8 r, column 8 j + 2 (lane % 4) + c.
template <int kColumns>
using Accumulator = float[kColumns / 2];
// One contraction step of a: [0], [1] are rows lane / 4 and + 8 at k = 2 (lane % 4), + 1; [2], [3] the same at k + 8.
using Fragment = std::uint32_t[4];

// Pins operand registers in place, as wgmma_pin() does for accumulators.
__device__ __forceinline__ void fragment_pin(Fragment& a) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

template <Operand kType, RightLayout kLayout>
__device__ __forceinline__ void wgmma_register_a(Accumulator<8>& d, const Fragment& a, std::uint64_t b,
                                                 bool accumulate) {
  if constexpr (kType == Operand::f16) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
        "%0, %1, %2, %3"
        "}, {%4, %5, %6, %7}, %8, accumulate, 1, 1, %10;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  } else {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, {%4, %5, %6, %7}, %8, accumulate, 1, 1, %10;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  }
}

template <Operand kType, RightLayout kLayout>
__device__ __forceinline__ void wgmma_register_a(Accumulator<16>& d, const Fragment& a, std::uint64_t b,
                                                 bool accumulate) {
  if constexpr (kType == Operand::f16) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, accumulate, 1, 1, %14;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  } else {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, accumulate, 1, 1, %14;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  }
}

template <Operand kType, RightLayout kLayout>
__device__ __forceinline__ void wgmma_register_a(Accumulator<32>& d, const Fragment& a, std::uint64_t b,
                                                 bool accumulate) {
  if constexpr (kType == Operand::f16) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, accumulate, 1, 1, %22;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  } else {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, accumulate, 1, 1, %22;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  }
}

template <Operand kType, RightLayout kLayout>
__device__ __forceinline__ void wgmma_register_a(Accumulator<64>& d, const Fragment& a, std::uint64_t b,
                                                 bool accumulate) {
  if constexpr (kType == Operand::f16) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, %38;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  } else {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, %38;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(kLayout)));
  }
}

}  // namespace chiasma::ptx
