// Micro-benchmarks of the CPU decode: the multiply-add ceiling, each stage on one thread, and whole decodes. The
// counter "flop" is a rate; a stage's share of the ceiling is its rate over FmaPeak's.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "bench/fma_peak.h"
#include "cpu/decode.h"
#include "cpu/decode_kernels.h"

namespace chiasma::bench {
namespace {

constexpr int kHeads = 128;
constexpr int kPageSize = 64;
constexpr double kDefaultScale = 1.0 / 24.0;

benchmark::Counter rate(double flops_per_iteration) {
  return {flops_per_iteration, benchmark::Counter::kIsIterationInvariantRate};
}

// 64-byte aligned, filled with small random numbers.
class Buffer {
 public:
  explicit Buffer(std::size_t count) : data_(static_cast<float*>(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64))) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < count; ++i) data_.get()[i] = normal(random);
  }
  float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
};

// A packed v32 pool of finite codes, plain scales and RoPE values.
std::vector<std::byte> make_pool(std::int64_t slots) {
  std::vector<std::byte> pool(static_cast<std::size_t>(slots) * v32::kRowBytes);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    std::byte* row = pool.data() + slot * v32::kRowBytes;
    for (int i = 0; i < v32::kNopeDim; ++i) row[i] = std::byte{float_to_e4m3(100.0f * normal(random))};
    for (int i = 0; i < v32::kNumTiles; ++i) {
      const float scale = 0.011f * (1.0f + 0.1f * static_cast<float>(i));
      std::memcpy(row + v32::kScalesOffset + i * v32::kScaleBytes, &scale, sizeof(scale));
    }
    for (int i = 0; i < kRopeDim; ++i) {
      const bf16_t value = to_bf16(normal(random));
      std::memcpy(row + v32::kRopeOffset + i * 2, &value, sizeof(value));
    }
  }
  return pool;
}

void FmaPeak(benchmark::State& state) {
  constexpr std::int64_t kRounds = 1 << 16;
  float sink = 1.0f;
  std::int64_t flops = 0;
  for (auto _ : state) flops += run_fma_peak(kRounds, &sink);
  benchmark::DoNotOptimize(sink);
  state.counters["flop"] = benchmark::Counter(static_cast<double>(flops), benchmark::Counter::kIsRate);
}
BENCHMARK(FmaPeak);
// The ceiling of the threads together, by the wall clock.
BENCHMARK(FmaPeak)->Name("FmaPeakThreads")->ThreadPerCpu()->UseRealTime();

void DequantizeKv(benchmark::State& state) {
  const std::int64_t slots = state.range(0);
  const std::vector<std::byte> pool = make_pool(slots);
  std::vector<cpu::RowBytes> rows;
  std::mt19937 random(3);
  for (int i = 0; i < cpu::kBlockTokens; ++i) {
    const std::byte* row = pool.data() + static_cast<std::int64_t>(random() % slots) * v32::kRowBytes;
    rows.push_back({row, row + v32::kScalesOffset});
  }
  const Buffer tile(cpu::kBlockTokens * cpu::kTileStride);
  for (auto _ : state) {
    cpu::dequantize_kv(KvFormat::v32, rows.data(), cpu::kBlockTokens, tile.get());
    benchmark::ClobberMemory();
  }
  state.counters["tokens"] = rate(cpu::kBlockTokens);
}
BENCHMARK(DequantizeKv)->Arg(cpu::kBlockTokens);

void PackQueries(benchmark::State& state) {
  std::vector<bf16_t> q(kHeads * v32::kKeyDim, to_bf16(1.5f));
  const Buffer queries(kHeads * v32::kKeyDim);
  for (auto _ : state) {
    for (int head = 0; head < kHeads; head += cpu::kHeadGroup) {
      cpu::pack_queries(q.data(), v32::kKeyDim, cpu::kHeadGroup, v32::kKeyDim, queries.get() + head * v32::kKeyDim);
    }
    benchmark::ClobberMemory();
  }
}
BENCHMARK(PackQueries);

// The stages below work on one group of heads.
void ScoreQk(benchmark::State& state) {
  const int heads = static_cast<int>(state.range(0));
  const Buffer queries(cpu::kHeadGroup * v32::kKeyDim);
  const Buffer tile(cpu::kBlockTokens * cpu::kTileStride);
  const Buffer scores(cpu::kBlockTokens * cpu::kScoreStride);
  for (auto _ : state) {
    cpu::score_qk(queries.get(), tile.get(), cpu::kBlockTokens, heads, v32::kKeyDim, 1.0f, scores.get());
    benchmark::ClobberMemory();
  }
  state.counters["flop"] = rate(2.0 * heads * cpu::kBlockTokens * v32::kKeyDim);
}
BENCHMARK(ScoreQk)->Arg(cpu::kHeadGroup)->Arg(16);

// A Partial over buffers of its own.
struct PartialBuffers {
  Buffer out{kValueDim * cpu::kHeadGroup}, max{cpu::kHeadGroup}, sum{cpu::kHeadGroup};
  std::int64_t tokens = 1;
  cpu::Partial view() { return {out.get(), max.get(), sum.get(), &tokens}; }
};

void SoftmaxStep(benchmark::State& state) {
  const Buffer scores(cpu::kBlockTokens * cpu::kScoreStride);
  const Buffer probabilities(cpu::kBlockTokens * cpu::kHeadGroup);
  const Buffer rescale(cpu::kHeadGroup);
  PartialBuffers partial;
  for (auto _ : state) {
    // The step overwrites scores with probabilities, which are scores as good as any.
    cpu::softmax_step(scores.get(), cpu::kBlockTokens, cpu::kHeadGroup, partial.view(), rescale.get(),
                      probabilities.get());
    benchmark::ClobberMemory();
  }
}
BENCHMARK(SoftmaxStep);

void AccumulatePv(benchmark::State& state) {
  const int heads = static_cast<int>(state.range(0));
  const Buffer tile(cpu::kBlockTokens * cpu::kTileStride);
  const Buffer probabilities(cpu::kBlockTokens * cpu::kHeadGroup);
  const std::vector<float> rescale(cpu::kHeadGroup, 0.5f);
  const Buffer out(kValueDim * cpu::kHeadGroup);
  for (auto _ : state) {
    cpu::accumulate_pv(probabilities.get(), tile.get(), cpu::kBlockTokens, heads, rescale.data(), 0, kValueDim,
                       out.get());
    benchmark::ClobberMemory();
  }
  state.counters["flop"] = rate(2.0 * heads * cpu::kBlockTokens * kValueDim);
}
BENCHMARK(AccumulatePv)->Arg(cpu::kHeadGroup)->Arg(16);

void MergePartials(benchmark::State& state) {
  PartialBuffers from, into;
  for (auto _ : state) {
    cpu::merge_partials(from.view(), into.view(), cpu::kHeadGroup);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(MergePartials);

// A decode call over a pool of 64 pages a request, with memory of its own.
struct DecodeCall {
  DecodeCall(std::int64_t b, int heads, std::int64_t topk) : pool(make_pool(b * kPages * kPageSize)) {
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < b * heads * v32::kKeyDim; ++i) q.push_back(to_bf16(normal(random)));
    for (std::int64_t i = 0; i < b * topk; ++i) {
      indices.push_back(static_cast<std::int32_t>(random() % (b * kPages * kPageSize)));
    }
    out.resize(static_cast<std::size_t>(b * heads * kValueDim));
    lse.resize(static_cast<std::size_t>(b * heads));
    problem.format = KvFormat::v32;
    problem.sm_scale = static_cast<float>(kDefaultScale);
    problem.b = b;
    problem.s_q = 1;
    problem.h_q = heads;
    problem.q = q.data();
    problem.q_stride_b = problem.q_stride_s = std::int64_t{heads} * v32::kKeyDim;
    problem.q_stride_h = v32::kKeyDim;
    problem.q_rope = problem.q + v32::kNopeDim;
    problem.q_rope_stride_b = problem.q_rope_stride_s = problem.q_stride_b;
    problem.q_rope_stride_h = problem.q_stride_h;
    problem.q_is_one_tensor = true;
    problem.kv = {pool.data(), kPageSize * v32::kRowBytes, b * kPages, kPageSize};
    problem.selection = {indices.data(), topk, topk, topk, nullptr, 0, 0};
    problem.out = out.data();
    problem.out_stride_b = problem.out_stride_s = std::int64_t{heads} * kValueDim;
    problem.out_stride_h = kValueDim;
    problem.lse = lse.data();
    problem.lse_stride_b = problem.lse_stride_s = heads;
    problem.lse_stride_h = 1;
  }

  static constexpr std::int64_t kPages = 64;
  std::vector<std::byte> pool;
  std::vector<bf16_t> q, out;
  std::vector<float> lse;
  std::vector<std::int32_t> indices;
  DecodeProblem problem = {};
};

void Decode(benchmark::State& state) {
  DecodeCall call(state.range(0), static_cast<int>(state.range(1)), state.range(2));
  const cpu::DecodeSchedule schedule = cpu::schedule_decode(call.problem, 0, static_cast<int>(state.range(3)));
  const Buffer workspace(schedule.workspace_bytes / sizeof(float) + 1);
  for (auto _ : state) {
    cpu::run_decode(call.problem, schedule, workspace.get());
    benchmark::ClobberMemory();
  }
  state.counters["flop"] =
      rate(2.0 * static_cast<double>(state.range(0) * state.range(1) * state.range(2)) * (v32::kKeyDim + kValueDim));
}
BENCHMARK(Decode)
    ->ArgNames({"b", "h", "topk", "threads"})
    ->Args({1, kHeads, 2048, 1})
    ->Args({1, kHeads, 2048, 0})
    ->Args({8, kHeads, 2048, 0})
    ->Args({8, 16, 2048, 0})
    ->MeasureProcessCPUTime()
    ->UseRealTime();

}  // namespace
}  // namespace chiasma::bench
