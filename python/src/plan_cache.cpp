#include "plan_cache.h"

#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "failure.h"

namespace chiasma::python {
namespace {

constexpr std::size_t kMaxPlans = 256;

// Everything that chiasma_decode_plan_create() looks at, as text that equals another only if the plans would be equal.
class PlanKey {
 public:
  PlanKey(const chiasma_decode_args& args, const chiasma_plan_options& options) {
    add(args.format);
    add(options.batch_invariant);
    add(options.num_splits);
    add(options.num_threads);
    for (const chiasma_tensor* tensor :
         {&args.q, &args.q_rope, &args.kv_cache, &args.indices, &args.topk_length, &args.attn_sink,
          &args.extra_kv_cache, &args.extra_indices, &args.extra_topk_length, &args.out, &args.lse}) {
      add(*tensor);
    }
    // Without a name the environment chooses, and may change its mind between two calls.
    const char* kernel = options.kernel != nullptr ? options.kernel : std::getenv("CHIASMA_KERNEL");
    add(options.kernel != nullptr ? 1 : 0);
    if (kernel != nullptr) kernel_ = kernel;
  }

  std::string_view words() const {
    return {reinterpret_cast<const char*>(words_.data()), count_ * sizeof(std::int64_t)};
  }
  std::string text() const { return std::string(words()).append(kernel_); }
  bool is(const std::string& text) const {
    return text.size() == words().size() + kernel_.size() && text.starts_with(words()) && text.ends_with(kernel_);
  }

 private:
  void add(std::int64_t word) { words_[count_++] = word; }
  void add(const chiasma_tensor& tensor) {
    add(tensor.rank);
    if (tensor.rank == 0) return;
    add(tensor.dtype);
    add(tensor.device.kind);
    add(tensor.device.index);
    for (int dim = 0; dim < tensor.rank; ++dim) {
      add(tensor.shape[dim]);
      add(tensor.stride[dim]);
    }
  }

  static constexpr std::size_t kTensorWords = 4 + 2 * CHIASMA_MAX_RANK;
  std::array<std::int64_t, 5 + 11 * kTensorWords> words_;
  std::size_t count_ = 0;
  std::string_view kernel_;
};

struct PlanCache {
  std::mutex mutex;
  std::unordered_map<std::string, PlanPointer> plans;
};

// Never destroyed: another thread may still decode while the process ends.
PlanCache& cache() {
  static auto* const instance = new PlanCache;
  return *instance;
}

PlanPointer make_plan(const chiasma_decode_args& args, const chiasma_plan_options& options) {
  chiasma_decode_plan* plan = nullptr;
  check(chiasma_decode_plan_create(&args, &options, &plan));
  return {plan, chiasma_decode_plan_destroy};
}

}  // namespace

PlanPointer find_plan(const chiasma_decode_args& args, const chiasma_plan_options& options) {
  const PlanKey key(args, options);
  // A layer after a layer asks for the same: neither hash nor lock then.
  thread_local std::string last_text;
  thread_local PlanPointer last_plan;
  if (last_plan != nullptr && key.is(last_text)) return last_plan;

  std::string text = key.text();
  PlanCache& shared = cache();
  PlanPointer plan;
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    const auto found = shared.plans.find(text);
    if (found != shared.plans.end()) plan = found->second;
  }
  if (plan == nullptr) {
    // Planning asks the device, which takes its time; others are not kept waiting.
    plan = make_plan(args, options);
    const std::lock_guard<std::mutex> lock(shared.mutex);
    // Shapes come and go with batches; starting over is simple, and plans are cheap enough to be made again.
    if (shared.plans.size() >= kMaxPlans) shared.plans.clear();
    shared.plans.emplace(text, plan);
  }
  last_text = std::move(text);
  last_plan = plan;
  return plan;
}

}  // namespace chiasma::python
