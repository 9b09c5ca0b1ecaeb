#include "cli/attention_example.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <utility>

#include "cli/decode_job.h"
#include "cli/error.h"
#include "cli/real_activations.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

constexpr chiasma_device kCpu{CHIASMA_CPU, 0};
constexpr int kTimedRuns = 5;

template <typename T>
chiasma_tensor cpu_tensor(const std::vector<T>& data, chiasma_dtype dtype, const std::vector<std::int64_t>& shape) {
  return chiasma_contiguous(const_cast<T*>(data.data()), dtype, kCpu, static_cast<std::int32_t>(shape.size()),
                            shape.data());
}

template <typename T>
void load(const SafetensorsFile& file, const char* name, Dtype dtype, std::size_t rank, std::vector<T>* data,
          std::vector<std::int64_t>* shape) {
  const SafetensorsTensor* tensor = file.find(name);
  if (tensor == nullptr) fail_input("{}: there is no tensor {}", file.path(), name);
  if (tensor->dtype != dtype || tensor->shape.size() != rank) {
    fail_input("{}: {} is {}; must be {} with {} dimensions", file.path(), name, describe(*tensor), dtype_name(dtype),
               rank);
  }
  *shape = tensor->shape;
  data->resize(tensor->data.size() / sizeof(T));
  if (!data->empty()) std::memcpy(data->data(), tensor->data.data(), tensor->data.size());
}

std::vector<bf16_t> random_values(std::mt19937& generator, std::int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<bf16_t> values(static_cast<std::size_t>(count));
  std::ranges::generate(values, [&] { return to_bf16(normal(generator)); });
  return values;
}

chiasma_tensor kv_rows(const AttentionExample& example) {
  return cpu_tensor(example.kv, CHIASMA_BFLOAT16, {example.kv_shape[0] * example.kv_shape[1], example.kv_shape[2]});
}

// Of numbers [..., from_columns], `columns` from the first-th on.
std::vector<bf16_t> columns_of(const std::vector<bf16_t>& values, std::int64_t from_columns, std::int64_t first,
                               std::int64_t columns) {
  std::vector<bf16_t> kept;
  kept.reserve(values.size() / static_cast<std::size_t>(from_columns) * static_cast<std::size_t>(columns));
  for (auto row = values.begin(); row != values.end(); row += from_columns) {
    kept.insert(kept.end(), row + first, row + first + columns);
  }
  return kept;
}

AttentionExample narrowed(const AttentionExample& example, const RowTraits& traits) {
  const std::int64_t columns = traits.key_dim(), all = example.kv_shape[2];
  if (columns == all) return example;
  const std::int64_t first = traits.has_rope ? all - columns : 0;
  AttentionExample narrow = example;
  narrow.q = columns_of(example.q, all, first, columns);
  narrow.kv = columns_of(example.kv, all, first, columns);
  narrow.q_shape[3] = narrow.kv_shape[2] = columns;
  return narrow;
}

double scale_of_cache(const AttentionExample& example) {
  float most = 0;
  for (const bf16_t value : example.kv) most = std::max(most, std::abs(to_float(value)));
  return most / kE4m3Max;
}

struct StoredCache {
  std::vector<std::byte> bytes;
  chiasma_tensor tensor{};  // of them
  double kv_scale = 0;
};

StoredCache quantise(const AttentionExample& example, CacheKind kind) {
  const RowTraits traits = traits_of(static_cast<KvFormat>(kind.format));
  const std::int64_t page_bytes = chiasma_kv_page_bytes(kind.format, example.kv_shape[1]);
  StoredCache cache;
  cache.bytes.resize(static_cast<std::size_t>(example.kv_shape[0] * page_bytes));
  const std::int64_t shape[] = {example.kv_shape[0], example.kv_shape[1], chiasma_kv_width(kind.format)};
  const chiasma_dtype dtype = traits.is_quantized() ? CHIASMA_UINT8 : CHIASMA_BFLOAT16;
  cache.tensor = chiasma_contiguous(cache.bytes.data(), dtype, kCpu, 3, shape);
  cache.tensor.stride[0] = page_bytes / (traits.is_quantized() ? 1 : 2);
  if (traits.scale_type == ScaleType::cache) cache.kv_scale = scale_of_cache(example);
  chiasma_quantize_args args{};
  args.format = kind.format;
  args.scale = kind.scale;
  args.kv_scale = cache.kv_scale;
  args.kv = kv_rows(example);
  args.kv_cache = cache.tensor;
  check_status(chiasma_quantize(&args, nullptr), example.name);
  return cache;
}

chiasma_decode_args decode_args(const AttentionExample& example, chiasma_kv_format format, chiasma_tensor kv_cache) {
  chiasma_decode_args args{};
  args.format = format;
  args.sm_scale = example.sm_scale;
  args.q = cpu_tensor(example.q, CHIASMA_BFLOAT16, example.q_shape);
  args.kv_cache = kv_cache;
  args.indices = cpu_tensor(example.indices, CHIASMA_INT32, example.indices_shape);
  return args;
}

std::vector<double> oracle_out(const AttentionExample& example, const chiasma_decode_args& args) {
  const std::int64_t rows = example.q_shape[0] * example.q_shape[1];
  const auto num_heads = static_cast<std::size_t>(rows * example.q_shape[2]);
  std::vector<double> out(num_heads * kValueDim);
  std::vector<double> lse(num_heads);
  check_status(chiasma_decode_oracle(&args, nullptr, rows, out.data(), lse.data(), nullptr, nullptr), example.name);
  return out;
}

void compare_oracles(const std::vector<double>& quantised, const std::vector<double>& exact, ExampleResult* result) {
  const std::size_t num_rows = exact.size() / kValueDim;
  for (std::size_t row = 0; row < num_rows; ++row) {
    double error = 0;
    double size = 0;
    for (std::size_t i = row * kValueDim; i < (row + 1) * kValueDim; ++i) {
      error += (quantised[i] - exact[i]) * (quantised[i] - exact[i]);
      size += exact[i] * exact[i];
    }
    const double relative = size > 0 ? std::sqrt(error / size) : 0.0;
    result->quantisation_mean += relative / static_cast<double>(num_rows);
    result->quantisation_max = std::max(result->quantisation_max, relative);
  }
}

double median_milliseconds(DecodeJob& job, harness::Device& device) {
  job.run();  // the first run pays for cold caches and for waking threads
  std::vector<double> times(kTimedRuns);
  std::ranges::generate(times, [&] { return device.time_us([&] { job.run(); }) / 1e3; });
  std::ranges::sort(times);
  return times[kTimedRuns / 2];
}

}  // namespace

AttentionExample load_example(const SafetensorsFile& file, std::string name) {
  AttentionExample example;
  example.name = std::move(name);
  load(file, "q", Dtype::kBF16, 4, &example.q, &example.q_shape);
  load(file, "kv", Dtype::kBF16, 3, &example.kv, &example.kv_shape);
  load(file, "indices", Dtype::kI32, 3, &example.indices, &example.indices_shape);
  const auto sm_scale = file.metadata().find("sm_scale");
  if (sm_scale == file.metadata().end()) fail_input("{}: metadata \"sm_scale\" is missing", file.path());
  example.sm_scale = std::strtod(sm_scale->second.c_str(), nullptr);
  return example;
}

AttentionExample real_example() {
  return load_example(SafetensorsFile::parse(real_activations(), "built-in real activations"), "real");
}

AttentionExample random_example() {
  constexpr std::int64_t kHeads = 64, kPages = 48, kPage = 64, kTopk = 1024;
  std::mt19937 generator(1);
  AttentionExample example;
  example.name = "random";
  example.sm_scale = chiasma_default_sm_scale(CHIASMA_KV_V32);
  example.q_shape = {1, 1, kHeads, v32::kKeyDim};
  example.kv_shape = {kPages, kPage, v32::kKeyDim};
  example.indices_shape = {1, 1, kTopk};
  example.q = random_values(generator, kHeads * v32::kKeyDim);
  example.kv = random_values(generator, kPages * kPage * v32::kKeyDim);
  std::uniform_int_distribution<std::int32_t> slot(0, kPages * kPage - 1);
  std::bernoulli_distribution masked(0.1);
  example.indices.resize(kTopk);
  std::ranges::generate(example.indices, [&] { return masked(generator) ? -1 : slot(generator); });
  return example;
}

ExampleResult work_through(const AttentionExample& whole, CacheKind kind, harness::Device& device,
                           const std::string& kernel) {
  const RowTraits traits = traits_of(static_cast<KvFormat>(kind.format));
  const AttentionExample example = narrowed(whole, traits);
  const StoredCache cache = quantise(example, kind);
  chiasma_decode_args args = decode_args(example, kind.format, cache.tensor);
  args.kv_scale = cache.kv_scale;
  const std::vector<DecodeTensor> inputs{
      {&chiasma_decode_args::q, example.q.size() * sizeof(bf16_t)},
      {&chiasma_decode_args::kv_cache, cache.bytes.size()},
      {&chiasma_decode_args::indices, example.indices.size() * sizeof(std::int32_t)},
  };
  ExampleResult result;
  DecodeJob job(args, inputs, device, {.kernel = kernel}, example.name);
  result.kernel = job.kernel();
  result.milliseconds = median_milliseconds(job, device);

  const std::vector<std::int64_t> out_shape{example.q_shape[0], example.q_shape[1], example.q_shape[2], kValueDim};
  args.out = chiasma_contiguous(const_cast<std::byte*>(job.out().data()), CHIASMA_BFLOAT16, kCpu, 4, out_shape.data());
  args.lse = chiasma_contiguous(const_cast<std::byte*>(job.lse().data()), CHIASMA_FLOAT32, kCpu, 3, out_shape.data());
  harness::Case spec;
  spec.fmt = kind.format;
  spec.scale = kind.scale;
  result.kernel_error = harness::check_decode(args, harness::tolerance_of(device.id().kind, spec));

  const chiasma_kv_format unquantised = traits.key_dim() == kMaxKeyDim ? CHIASMA_KV_BF16 : CHIASMA_KV_BF16_NOPE;
  const chiasma_decode_args exact =
      decode_args(example, unquantised, cpu_tensor(example.kv, CHIASMA_BFLOAT16, example.kv_shape));
  compare_oracles(oracle_out(example, args), oracle_out(example, exact), &result);
  return result;
}

}  // namespace chiasma::cli
