// `chiasma info`: what this build can do on this machine.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cpu/decode.h"
#include "format/kv_format.h"
#include "harness/case.h"

namespace chiasma::cli {
namespace {

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

void print_devices() {
  fmt::print("\ndevices\n");
  for (std::int32_t number = 0; number < chiasma_device_count(); ++number) {
    chiasma_device_info info{};
    check_status(chiasma_device_query(number, &info), "device");
    const bool is_cpu = info.device.kind == CHIASMA_CPU;
    const std::string name = is_cpu ? "cpu" : fmt::format("cuda:{}", info.device.index);
    const std::string units = is_cpu ? fmt::format("{} threads, SIMD {}", info.compute_units, cpu::simd_target())
                                     : fmt::format("{} multiprocessors, compute capability {}.{}", info.compute_units,
                                                   info.cuda_capability / 10, info.cuda_capability % 10);
    fmt::print("  {:<8} {}; {}; {:.1f} GiB\n", name, static_cast<const char*>(info.name), units,
               static_cast<double>(info.memory_bytes) / kGib);
  }
  if (chiasma_cuda_available() != CHIASMA_OK) fmt::print("  cuda     not available: {}\n", chiasma_last_error());
}

void print_kernels() {
  fmt::print("\nkernels\n");
  for (std::int32_t number = 0; number < chiasma_kernel_count(); ++number) {
    chiasma_kernel_info info{};
    check_status(chiasma_kernel_query(number, &info), "kernel");
    fmt::print("  {} ({})\n    {}\n    supports {}\n", info.name, info.device_kind == CHIASMA_CPU ? "cpu" : "cuda",
               info.summary, info.supports);
  }
}

// Tensors without data on some device.
struct Shapes {
  chiasma_device device;

  chiasma_tensor of(chiasma_dtype dtype, std::initializer_list<std::int64_t> shape) const {
    return chiasma_contiguous(nullptr, dtype, device, static_cast<std::int32_t>(shape.size()), shape.begin());
  }

  chiasma_tensor of_length(const harness::Case& spec, harness::LengthMode mode) const {
    return mode == harness::LengthMode::kRows ? of(CHIASMA_INT32, {spec.b, spec.sq}) : of(CHIASMA_INT32, {spec.b});
  }
};

chiasma_tensor shape_of_cache(const Shapes& shapes, const harness::Case& spec, std::int64_t pool, std::int64_t page) {
  const auto format = static_cast<KvFormat>(spec.fmt);
  const std::int64_t num_pages = spec.b * ((pool + page - 1) / page);
  const chiasma_dtype dtype = traits_of(format).is_quantized() ? CHIASMA_UINT8 : CHIASMA_BFLOAT16;
  chiasma_tensor cache = shapes.of(dtype, {num_pages, page, token_extent(format)});
  if (traits_of(format).has_scale_plane()) cache.stride[0] = chiasma_kv_page_bytes(spec.fmt, page);
  return cache;
}

// Plans look at shapes alone, so the case needs no memory, however large it is.
void print_plan(const std::string& line, const std::string& device) {
  harness::Case spec;
  std::string error;
  if (!harness::parse_case(line, &spec, &error)) fail_input("--case: {}", error);
  const Shapes shapes{open_device(device, "")->id()};
  const std::int64_t width = key_dim(static_cast<KvFormat>(spec.fmt));
  chiasma_decode_args args{};
  args.format = spec.fmt;
  args.sm_scale = spec.sm_scale();
  args.kv_scale = spec.kv_scale();
  args.q = shapes.of(CHIASMA_BFLOAT16, {spec.b, spec.sq, spec.h, width - (spec.q_pair ? kRopeDim : 0)});
  if (spec.q_pair) args.q_rope = shapes.of(CHIASMA_BFLOAT16, {spec.b, spec.sq, spec.h, kRopeDim});
  args.kv_cache = shape_of_cache(shapes, spec, spec.pool, spec.page);
  args.indices = shapes.of(CHIASMA_INT32, {spec.b, spec.sq, spec.topk});
  if (spec.len != harness::LengthMode::kNone) args.topk_length = shapes.of_length(spec, spec.len);
  if (spec.sink != harness::SinkMode::kNone) args.attn_sink = shapes.of(CHIASMA_FLOAT32, {spec.h});
  if (spec.has_extra()) {
    args.extra_kv_cache = shape_of_cache(shapes, spec, spec.xpool, spec.xpage);
    args.extra_indices = shapes.of(CHIASMA_INT32, {spec.b, spec.sq, spec.xtopk});
    if (spec.xlen != harness::LengthMode::kNone) args.extra_topk_length = shapes.of_length(spec, spec.xlen);
  }
  args.out = shapes.of(CHIASMA_BFLOAT16, {spec.b, spec.sq, spec.h, kValueDim});
  args.lse = shapes.of(CHIASMA_FLOAT32, {spec.b, spec.sq, spec.h});
  chiasma_plan_options options{};
  options.num_splits = static_cast<std::int32_t>(spec.splits);
  options.batch_invariant = spec.invariant ? 1 : 0;
  chiasma_decode_plan* plan = nullptr;
  check_status(chiasma_decode_plan_create(&args, &options, &plan), line);
  fmt::print("{}\n", chiasma_decode_plan_text(plan));
  chiasma_decode_plan_destroy(plan);
}

void print_info() {
  fmt::print("chiasma {}\n", chiasma_version());
  print_devices();
  print_kernels();
}

}  // namespace

void register_info(CLI::App& app, int& exit_code) {
  auto line = std::make_shared<std::string>();
  auto device = std::make_shared<std::string>("auto");
  CLI::App* command = app.add_subcommand("info", "Version, devices, and kernels with what each supports");
  command->add_option("--case", *line, "print the plan for this case line instead, such as \"decode b=8 h=128\"");
  command->add_option("--device", *device, "of that plan: " + std::string(kDeviceHelp))->capture_default_str();
  command->callback([line, device, &exit_code] {
    if (line->empty()) {
      print_info();
    } else {
      print_plan(*line, *device);
    }
    exit_code = kExitOk;
  });
}

}  // namespace chiasma::cli
