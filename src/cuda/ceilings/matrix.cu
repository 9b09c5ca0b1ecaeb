// Tensor cores: what each shape of product reaches with its operands in shared memory or registers.
#include "cuda/ceilings/probe.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_register_a.cuh"
#include "cuda/ptx/wgmma_shapes.cuh"
#include "cuda/tile/swizzle.h"

namespace chiasma::ceilings {
namespace {

constexpr int kWarpgroupThreads = 128;
constexpr int kM = 64;
constexpr int kPanels = 8;  // of 64 rows and 64 columns (of 16 bits), for each operand
constexpr int kPanelBytes = kM * tile::kPanelRowBytes;
constexpr std::uint32_t kSharedBytes = 2 * kPanels * kPanelBytes + tile::kAtomBytes;
constexpr int kStepsPerPanel = 4;  // a step contracts over 32 bytes
constexpr int kGroups = 32;        // of kPanels * kStepsPerPanel products

struct Operands {
  std::uint64_t a, b, b_transposed;  // descriptors of the first panel
  std::uint32_t registers[kStepsPerPanel][4];
};

// Descriptor distances in 16-byte units.
__device__ constexpr int step_offset(int panel, int step) {
  return (panel * kPanelBytes + step * 32) / 16;
}
// Of products whose b has the contraction along its rows: 16 rows a step, kPanelsAcross panels side by side.
template <int kPanelsAcross>
__device__ constexpr int transposed_offset(int panel, int step) {
  return (panel % (kPanels / kPanelsAcross) * kPanelsAcross * kPanelBytes + step * 2 * tile::kAtomBytes) / 16;
}

struct F16N64 {
  static constexpr int kN = 64, kK = 16, kMaxWarpgroups = 3;
  static constexpr const char* kId = "f16_n64";
  static constexpr const char* kWhat = "m64n64k16 f16, both operands in shared memory";
  __device__ static void issue(float (&d)[kN / 2], const Operands& operands, int panel, int step) {
    ptx::wgmma_m64n64k16(d, operands.a + step_offset(panel, step), operands.b + step_offset(panel, step), true);
  }
};
struct F16N64Ra {
  static constexpr int kN = 64, kK = 16, kMaxWarpgroups = 3;
  static constexpr const char* kId = "f16_n64_ra";
  static constexpr const char* kWhat = "m64n64k16 f16, A in registers";
  __device__ static void issue(float (&d)[kN / 2], const Operands& operands, int panel, int step) {
    ptx::wgmma_register_a<ptx::Operand::f16, ptx::RightLayout::k_major>(d, operands.registers[step],
                                                                        operands.b + step_offset(panel, step), true);
  }
};
struct F16N128 {
  static constexpr int kN = 128, kK = 16, kMaxWarpgroups = 3;
  static constexpr const char* kId = "f16_n128";
  static constexpr const char* kWhat = "m64n128k16 f16, both operands in shared memory";
  __device__ static void issue(float (&d)[kN / 2], const Operands& operands, int panel, int step) {
    ptx::wgmma_m64n128k16(d, operands.a + step_offset(panel, step),
                          operands.b_transposed + transposed_offset<2>(panel, step));
  }
};
struct F16N128Ra {
  static constexpr int kN = 128, kK = 16, kMaxWarpgroups = 3;
  static constexpr const char* kId = "f16_n128_ra";
  static constexpr const char* kWhat = "m64n128k16 f16, A in registers";
  __device__ static void issue(float (&d)[kN / 2], const Operands& operands, int panel, int step) {
    ptx::wgmma_m64n128k16(d, operands.registers[step], operands.b_transposed + transposed_offset<2>(panel, step));
  }
};
struct F16N256 {
  static constexpr int kN = 256, kK = 16, kMaxWarpgroups = 2;
  static constexpr const char* kId = "f16_n256";
  static constexpr const char* kWhat = "m64n256k16 f16, both operands in shared memory";
  __device__ static void issue(float (&d)[kN / 2], const Operands& operands, int panel, int step) {
    ptx::wgmma_m64n256k16(d, operands.a + step_offset(panel, step),
                          operands.b_transposed + transposed_offset<4>(panel, step));
  }
};
struct F16N256Ra {
  static constexpr int kN = 256, kK = 16, kMaxWarpgroups = 2;
  static constexpr const char* kId = "f16_n256_ra";
  static constexpr const char* kWhat = "m64n256k16 f16, A in registers";
  __device__ static void issue(float (&d)[kN / 2], const Operands& operands, int panel, int step) {
    ptx::wgmma_m64n256k16_ra(d, operands.registers[step], operands.b_transposed + transposed_offset<4>(panel, step));
  }
};
struct E4m3N64 {
  static constexpr int kN = 64, kK = 32, kMaxWarpgroups = 3;
  static constexpr const char* kId = "e4m3_n64";
  static constexpr const char* kWhat = "m64n64k32 e4m3, both operands in shared memory";
  __device__ static void issue(float (&d)[kN / 2], const Operands& operands, int panel, int step) {
    ptx::wgmma_m64n64k32_e4m3(d, operands.a + step_offset(panel, step), operands.b + step_offset(panel, step));
  }
};

__device__ __forceinline__ Operands make_operands(std::uint32_t shared) {
  Operands operands;
  operands.a = tile::descriptor(shared, 0, tile::kAtomBytes);
  operands.b = tile::descriptor(shared + kPanels * kPanelBytes, 0, tile::kAtomBytes);
  operands.b_transposed = tile::descriptor(shared + kPanels * kPanelBytes, kPanelBytes, tile::kAtomBytes);
#pragma unroll
  for (int i = 0; i < kStepsPerPanel * 4; ++i) {
    operands.registers[i / 4][i % 4] = random_operand(threadIdx.x * 16 + i);
  }
  return operands;
}

// Every warpgroup multiplies with an accumulator of its own, one group of products ahead of the one it waits for.
template <typename Product>
__global__ void __launch_bounds__(Product::kMaxWarpgroups* kWarpgroupThreads, 1)
    matrix_probe(int groups, BlockTime* times) {
  extern __shared__ std::uint8_t shared_memory[];
  const std::uint32_t shared =
      (ptx::shared_address(shared_memory) + tile::kAtomBytes - 1) / tile::kAtomBytes * tile::kAtomBytes;
  fill_shared(shared_memory, kSharedBytes);
  ptx::fence_proxy_async();
  const Operands operands = make_operands(shared);
  float d[Product::kN / 2] = {};
  const Stopwatch watch;
  for (int group = 0; group < groups; ++group) {
    ptx::wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int step = 0; step < kStepsPerPanel; ++step) Product::issue(d, operands, panel, step);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(d);
  watch.stop(times);
  float sum = 0;
#pragma unroll
  for (const float value : d) sum += value;
  keep(__float_as_uint(sum), times);
}

template <typename Product>
constexpr double flop_per_group() {
  return 2.0 * kM * Product::kN * Product::kK * kPanels * kStepsPerPanel;
}

template <typename Product>
void measure_product(Recorder& recorder) {
  for (int warpgroups = 1; warpgroups <= Product::kMaxWarpgroups; ++warpgroups) {
    recorder.measure_per_clk(
        {concat("wgmma_", Product::kId, "_wg", warpgroups),
         concat(Product::kWhat, ", ", warpgroups, warpgroups == 1 ? " warpgroup" : " warpgroups"), "flop/clk/SM"},
        warpgroups * kGroups * flop_per_group<Product>(), {warpgroups * kWarpgroupThreads, kSharedBytes},
        matrix_probe<Product>, kGroups);
  }
}

}  // namespace

void measure_matrix(Recorder& recorder) {
  measure_product<F16N64>(recorder);
  measure_product<F16N64Ra>(recorder);
  measure_product<F16N128>(recorder);
  measure_product<F16N128Ra>(recorder);
  measure_product<F16N256>(recorder);
  measure_product<F16N256Ra>(recorder);
  measure_product<E4m3N64>(recorder);
}

// Long enough for the power limit to act.
void measure_sustained(Recorder& recorder) {
  constexpr int kLaunches = 4;
  constexpr int kLongGroups = 60 * kGroups;
  constexpr int kWarpgroups = 2;
  using Product = F16N256;
  const double flop = flop_per_group<Product>() * kLongGroups * kWarpgroups * recorder.num_sms() * kLaunches;
  recorder.measure_per_second(
      {"wgmma_sustained", "m64n256k16 f16, 2 warpgroups, without a pause", "TFLOPS"}, flop, [&] {
        for (int i = 0; i < kLaunches; ++i) {
          matrix_probe<Product>
              <<<recorder.num_sms(), kWarpgroups * kWarpgroupThreads, kSharedBytes>>>(kLongGroups, recorder.scratch());
        }
      });
}

}  // namespace chiasma::ceilings
