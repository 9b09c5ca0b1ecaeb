// Differential fuzzing: random cases on each CUDA kernel in turn, against the oracle, and against themselves with other
// scratch contents. CHIASMA_FUZZ_SECONDS makes it run longer, CHIASMA_FUZZ_SEED starts elsewhere.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "gpu_fixture.h"
#include "harness/check.h"
#include "harness/random.h"
#include "harness/random_case.h"

namespace chiasma::harness {
namespace {

constexpr double kDefaultSeconds = 20;
constexpr std::uint64_t kDefaultSeed = 90;
// One row of 128 heads and 2048 entries fits.
constexpr double kMaxMultiplyAdds = 3e8;
// The share of cases that must have been done and not refused.
constexpr double kLeastDone = 0.5;

void change_format(Case& spec, chiasma_kv_format format) {
  spec.fmt = format;
  spec.xpool = spec.xtopk = 0;
  spec.xpage = 64;
  spec.xlen = LengthMode::kNone;
}

// What a kernel is for: the published designs read v32 caches, from strides that 16-byte accesses can serve.
Case random_gpu_case(std::uint64_t key, const std::string& kernel) {
  Case spec = random_case(key, kMaxMultiplyAdds);
  const bool is_bf16 = spec.fmt == CHIASMA_KV_BF16 || spec.fmt == CHIASMA_KV_BF16_NOPE;
  if (kernel == "sm90_sparse_bf16") {
    if (!is_bf16) change_format(spec, key % 2 == 0 ? CHIASMA_KV_BF16 : CHIASMA_KV_BF16_NOPE);
    if (spec.fmt == CHIASMA_KV_BF16_NOPE) spec.q_pair = false;
    return spec;
  }
  if (kernel == "sm90_sparse_fp8_direct") return spec;
  if (spec.fmt != CHIASMA_KV_V32) change_format(spec, CHIASMA_KV_V32);
  if (spec.layout == Layout::kOdd) spec.layout = Layout::kStrided;
  if (spec.len == LengthMode::kRows) spec.len = LengthMode::kRandom;
  spec.q_pair = false;
  return spec;
}

class GpuRandomCases : public GpuTest {
 protected:
  // "" when the case is right; *done tells whether the kernel does such cases at all.
  std::string problem_of(const Case& spec, const std::string& kernel, bool* done) {
    std::string message;
    const std::unique_ptr<Workload> workload = Workload::make(spec, &message);
    if (workload == nullptr) return message;
    RunOptions options;
    options.kernel = kernel;
    options.queue = queue_.get();
    RunError error;
    const std::unique_ptr<Runner> runner = Runner::make(*workload, *device_, options, &error);
    *done = runner != nullptr;
    if (runner == nullptr) return error.status == CHIASMA_UNSUPPORTED ? "" : error.message;
    if (!runner->launch(&error) || !runner->fetch(&error)) return error.message;
    const CheckReport report =
        check(*workload, tolerance_of(CHIASMA_CUDA, spec), {.max_multiply_adds = kMaxMultiplyAdds, .rows = {}});
    if (!report.passed) return report.failure;
    const std::vector<std::byte> first = output_bytes(*workload);
    constexpr int kNanByte = 0xff;
    queue_->fill(runner->workspace(), kNanByte, runner->workspace_bytes());
    if (!runner->launch(&error) || !runner->fetch(&error)) return error.message;
    return output_bytes(*workload) == first ? "" : "a second run, with other scratch contents, gave other bits";
  }

  std::unique_ptr<Queue> queue_;
};

TEST_F(GpuRandomCases, MatchTheOracle) {
  const char* seconds_text = std::getenv("CHIASMA_FUZZ_SECONDS");
  const char* seed_text = std::getenv("CHIASMA_FUZZ_SEED");
  const double seconds = seconds_text == nullptr ? kDefaultSeconds : std::strtod(seconds_text, nullptr);
  const std::uint64_t seed = seed_text == nullptr ? kDefaultSeed : std::strtoull(seed_text, nullptr, 10);
  queue_ = device_->open_queue();
  const std::vector<std::string> kernels = cuda_kernels();
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  std::size_t count = 0;
  std::vector<int> done(kernels.size());
  // Whole rounds, so that every kernel has its turn however slow the machine.
  for (; count % kernels.size() != 0 || count == 0 || elapsed() < seconds; ++count) {
    const std::string& kernel = kernels[count % kernels.size()];
    const Case spec = random_gpu_case(derive(seed, count), kernel);
    bool is_done = false;
    const std::string problem = problem_of(spec, kernel, &is_done);
    done[count % kernels.size()] += is_done ? 1 : 0;
    EXPECT_EQ(problem, "") << "case " << count << " of seed " << seed
                           << "; again: chiasma verify --device cuda --kernel " << kernel << " --case '"
                           << to_line(spec) << "'";
  }
  for (std::size_t n = 0; n < kernels.size(); ++n) {
    std::printf("%s: %d cases of seed %llu\n", kernels[n].c_str(), done[n], static_cast<unsigned long long>(seed));
    EXPECT_GE(done[n], kLeastDone * static_cast<double>(count / kernels.size())) << kernels[n] << " refused the others";
  }
}

}  // namespace
}  // namespace chiasma::harness
