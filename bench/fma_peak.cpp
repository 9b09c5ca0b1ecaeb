#include "bench/fma_peak.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/fma_peak.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// After foreach_target.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chiasma::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

std::int64_t run_fma_peak(std::int64_t rounds, float* sink) {
  const hn::CappedTag<float, 16> d;
  using Vec = hn::Vec<decltype(d)>;
  // 12 chains hide a latency of up to 6 cycles at two multiply-adds a cycle, with registers to spare.
  constexpr int kChains = 12;
  const Vec factor = hn::Set(d, 0.999f);
  const Vec addend = hn::Set(d, *sink);
  Vec c0 = addend, c1 = addend, c2 = addend, c3 = addend, c4 = addend, c5 = addend;
  Vec c6 = addend, c7 = addend, c8 = addend, c9 = addend, c10 = addend, c11 = addend;
  for (std::int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(c0, factor, addend);
    c1 = hn::MulAdd(c1, factor, addend);
    c2 = hn::MulAdd(c2, factor, addend);
    c3 = hn::MulAdd(c3, factor, addend);
    c4 = hn::MulAdd(c4, factor, addend);
    c5 = hn::MulAdd(c5, factor, addend);
    c6 = hn::MulAdd(c6, factor, addend);
    c7 = hn::MulAdd(c7, factor, addend);
    c8 = hn::MulAdd(c8, factor, addend);
    c9 = hn::MulAdd(c9, factor, addend);
    c10 = hn::MulAdd(c10, factor, addend);
    c11 = hn::MulAdd(c11, factor, addend);
    // The chains are all alike; this keeps the compiler from computing one for all twelve.
#if HWY_ARCH_X86
    __asm__ volatile(""
                     : "+x"(c0.raw), "+x"(c1.raw), "+x"(c2.raw), "+x"(c3.raw), "+x"(c4.raw), "+x"(c5.raw), "+x"(c6.raw),
                       "+x"(c7.raw), "+x"(c8.raw), "+x"(c9.raw), "+x"(c10.raw), "+x"(c11.raw));
#endif
  }
  Vec sum = hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)), hn::Add(hn::Add(c4, c5), hn::Add(c6, c7)));
  sum = hn::Add(sum, hn::Add(hn::Add(c8, c9), hn::Add(c10, c11)));
  *sink = hn::GetLane(sum);
  return rounds * kChains * 2 * static_cast<std::int64_t>(hn::Lanes(d));
}

}  // namespace chiasma::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chiasma::bench {

HWY_EXPORT(run_fma_peak);

std::int64_t run_fma_peak(std::int64_t rounds, float* sink) {
  return HWY_DYNAMIC_DISPATCH(run_fma_peak)(rounds, sink);
}

}  // namespace chiasma::bench

// For compare_pytorch.py, which measures the ceiling in its own process.
extern "C" __attribute__((visibility("default"))) std::int64_t chiasma_bench_fma_peak(std::int64_t rounds,
                                                                                      float* sink) {
  return chiasma::bench::run_fma_peak(rounds, sink);
}
#endif
