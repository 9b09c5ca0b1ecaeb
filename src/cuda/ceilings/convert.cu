// From e4m3 codes to what the tensor cores multiply, by several routes, and the exponential of the softmax.
#include <cuda_fp16.h>

#include "cuda/ceilings/probe.cuh"
#include "cuda/ptx/convert.cuh"

namespace chiasma::ceilings {
namespace {

constexpr int kCodesPerLoad = 16;
constexpr int kWordsPerLoad = kCodesPerLoad / 2;  // results, two 16-bit numbers each

__device__ __forceinline__ std::uint32_t bits_of(__half2 value) {
  return *reinterpret_cast<const std::uint32_t*>(&value);
}
__device__ __forceinline__ __half2 half2_of(std::uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}

struct Scale {
  std::uint32_t half2;      // the same number twice
  std::uint32_t remainder;  // what half2 lacks of the stored scale, likewise
  float f32;
};

// A route turns the four words of a load into eight.
struct CvtOnly {
  static constexpr const char* kId = "cvt_f16";
  static constexpr const char* kWhat = "e4m3 to f16 by cvt";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale&, std::uint32_t (&out)[kWordsPerLoad]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::e4m3x4_to_half2x2(codes[i], out[2 * i], out[2 * i + 1]);
    }
  }
};

struct CvtScale {
  static constexpr const char* kId = "cvt_f16_scale";
  static constexpr const char* kWhat = "e4m3 to f16 by cvt, f16x2 multiply";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale& scale,
                                 std::uint32_t (&out)[kWordsPerLoad]) {
    CvtOnly::convert(codes, scale, out);
#pragma unroll
    for (int i = 0; i < kWordsPerLoad; ++i) out[i] = ptx::multiply_half2(out[i], scale.half2);
  }
};

struct CvtExactScale {
  static constexpr const char* kId = "cvt_f16_exact_scale";
  static constexpr const char* kWhat = "e4m3 to f16 by cvt, times a float32 scale in two f16 parts";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale& scale,
                                 std::uint32_t (&out)[kWordsPerLoad]) {
    CvtOnly::convert(codes, scale, out);
#pragma unroll
    for (int i = 0; i < kWordsPerLoad; ++i) {
      const std::uint32_t low = ptx::multiply_half2(out[i], scale.remainder);
      out[i] = bits_of(__hfma2(half2_of(out[i]), half2_of(scale.half2), half2_of(low)));
    }
  }
};

struct CvtF32Bf16 {
  static constexpr const char* kId = "cvt_f32_scale_bf16";
  static constexpr const char* kWhat = "e4m3 to f16 to float32, float32 multiply, to bf16";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale& scale,
                                 std::uint32_t (&out)[kWordsPerLoad]) {
    CvtOnly::convert(codes, scale, out);
#pragma unroll
    for (int i = 0; i < kWordsPerLoad; ++i) {
      const float2 wide = __half22float2(half2_of(out[i]));
      out[i] = ptx::pack_bf162(wide.x * scale.f32, wide.y * scale.f32);
    }
  }
};

// Moves exponent and mantissa of the bytes in odd (or, shifted left by 8 before, even) places to where f16 has them.
// The bias differs by 8, which the scale makes up for; NaN codes become 480.
__device__ __forceinline__ void expand_word(std::uint32_t codes, std::uint32_t* even, std::uint32_t* odd) {
  *even = ((codes << 7) & 0x3f803f80u) | ((codes << 8) & 0x80008000u);
  *odd = ((codes >> 1) & 0x3f803f80u) | (codes & 0x80008000u);
}

struct ShiftScale {
  static constexpr const char* kId = "shift_f16_scale";
  static constexpr const char* kWhat = "e4m3 to f16 by shifts and lop3, f16x2 multiply (no NaN)";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale& scale,
                                 std::uint32_t (&out)[kWordsPerLoad]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) expand_word(codes[i], &out[2 * i], &out[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < kWordsPerLoad; ++i) out[i] = ptx::multiply_half2(out[i], scale.half2);
  }
};

// Both units at work: one word in four by shifts.
struct MixedScale {
  static constexpr const char* kId = "mixed_f16_scale";
  static constexpr const char* kWhat = "three words of four by cvt, one by shifts, f16x2 multiply";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale& scale,
                                 std::uint32_t (&out)[kWordsPerLoad]) {
    CvtOnly::convert(codes, scale, out);
    expand_word(codes[3], &out[6], &out[7]);
#pragma unroll
    for (int i = 0; i < kWordsPerLoad; ++i) out[i] = ptx::multiply_half2(out[i], scale.half2);
  }
};

// Two rows' bytes interleaved first, as a product that contracts over rows wants its pairs.
struct PrmtCvt {
  static constexpr const char* kId = "prmt_cvt_f16";
  static constexpr const char* kWhat = "bytes of two rows interleaved by prmt, e4m3 to f16 by cvt";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale&, std::uint32_t (&out)[kWordsPerLoad]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const std::uint32_t low = __byte_perm(codes[i], codes[i + 1], 0x5140);
      const std::uint32_t high = __byte_perm(codes[i], codes[i + 1], 0x7362);
      ptx::e4m3x4_to_half2x2(low, out[2 * i], out[2 * i + 1]);
      ptx::e4m3x4_to_half2x2(high, out[2 * i + 2], out[2 * i + 3]);
    }
  }
};

struct PrmtCvtScale {
  static constexpr const char* kId = "prmt_cvt_f16_scale";
  static constexpr const char* kWhat = "bytes of two rows interleaved by prmt, cvt, f16x2 multiply";
  __device__ static void convert(const std::uint32_t (&codes)[4], const Scale& scale,
                                 std::uint32_t (&out)[kWordsPerLoad]) {
    PrmtCvt::convert(codes, scale, out);
#pragma unroll
    for (int i = 0; i < kWordsPerLoad; ++i) out[i] = ptx::multiply_half2(out[i], scale.half2);
  }
};

constexpr int kTableLoads = 1024;  // 16 KB of codes in shared memory
constexpr int kUnroll = 4;
constexpr int kConvertRounds = 256;

// Codes come from shared memory, 16 a lane and load; two results at a time are summed up, so that none can be dropped.
template <typename Route>
__global__ void convert_probe(float scale_f32, BlockTime* times) {
  __shared__ uint4 table[kTableLoads];
  fill_shared(table, sizeof table);
  const __half high = __float2half_rn(scale_f32);
  const __half low = __float2half_rn(scale_f32 - __half2float(high));
  const Scale scale{bits_of(__half2half2(high)), bits_of(__half2half2(low)), scale_f32};
  __half2 sums[kUnroll] = {};
  const Stopwatch watch;
  for (int round = 0; round < kConvertRounds; ++round) {
    const int base = (round * 32 * kUnroll + static_cast<int>(threadIdx.x)) % (kTableLoads / 2);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint4 load = table[base + 32 * i];
      const std::uint32_t codes[4] = {load.x, load.y, load.z, load.w};
      std::uint32_t out[kWordsPerLoad];
      Route::convert(codes, scale, out);
#pragma unroll
      for (int j = 0; j < kWordsPerLoad; j += 2) sums[i] = __hfma2(half2_of(out[j]), half2_of(out[j + 1]), sums[i]);
    }
  }
  keep(bits_of(sums[0] + sums[1]) ^ bits_of(sums[2] + sums[3]), times);
  watch.stop(times);
}

constexpr int kExp2Chains = 8;
constexpr int kExp2Rounds = 512;

__global__ void exp2_probe(float start, BlockTime* times) {
  float values[kExp2Chains];
#pragma unroll
  for (int i = 0; i < kExp2Chains; ++i) values[i] = start * static_cast<float>(threadIdx.x + i);
  const Stopwatch watch;
  for (int round = 0; round < kExp2Rounds; ++round) {
#pragma unroll
    for (float& value : values) value = ptx::exp2_approx(value);
  }
  float sum = 0;
#pragma unroll
  for (const float value : values) sum += value;
  keep(__float_as_uint(sum), times);
  watch.stop(times);
}

constexpr int kWarpCounts[] = {4, 8, 12};

template <typename Route>
void measure_route(Recorder& recorder) {
  for (const int warps : kWarpCounts) {
    const int threads = warps * 32;
    recorder.measure_per_clk({concat("convert_", Route::kId, "_w", warps), concat(Route::kWhat, ", ", warps, " warps"),
                              "values/clk/SM", 512, "512 values"},
                             static_cast<double>(threads) * kConvertRounds * kUnroll * kCodesPerLoad, {threads},
                             convert_probe<Route>, 0.8f);
  }
}

}  // namespace

void measure_convert(Recorder& recorder) {
  measure_route<CvtOnly>(recorder);
  measure_route<CvtScale>(recorder);
  measure_route<CvtExactScale>(recorder);
  measure_route<CvtF32Bf16>(recorder);
  measure_route<ShiftScale>(recorder);
  measure_route<MixedScale>(recorder);
  measure_route<PrmtCvt>(recorder);
  measure_route<PrmtCvtScale>(recorder);
  for (const int warps : kWarpCounts) {
    const int threads = warps * 32;
    recorder.measure_per_clk(
        {concat("exp2_w", warps), concat("ex2.approx, ", warps, " warps"), "values/clk/SM", 4096, "64 x 64 values"},
        static_cast<double>(threads) * kExp2Rounds * kExp2Chains, {threads}, exp2_probe, -0.01f);
  }
}

}  // namespace chiasma::ceilings
