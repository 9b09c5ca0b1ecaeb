// libFuzzer target for the C interface's arguments: bytes become a call with hostile shapes, strides, types, devices,
// options, indices and lengths. Whatever comes, a call returns a status; it never crashes, reads or writes outside the
// tensors. Each tensor's memory is exactly as large as its shape and strides say, so that the address sanitizer sees
// every step outside; a tensor too large to have gets a null pointer, which the library must refuse without following
// it.
#include <chiasma/chiasma.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace {

constexpr std::int64_t kMaxTensorBytes = 1 << 16;
constexpr std::int64_t kMaxElements = 1 << 20;  // of tensors with strides of 0, which need little memory
constexpr std::size_t kMaxWorkspace = std::size_t{64} << 20;
constexpr std::size_t kWorkspaceAlignment = 256;
constexpr std::array<std::int64_t, 18> kNastyNumbers = {0,
                                                        1,
                                                        2,
                                                        3,
                                                        15,
                                                        16,
                                                        63,
                                                        127,
                                                        128,
                                                        129,
                                                        512,
                                                        576,
                                                        656,
                                                        -1,
                                                        std::int64_t{1} << 31,
                                                        (std::int64_t{1} << 32) + 1,
                                                        std::numeric_limits<std::int64_t>::max(),
                                                        std::numeric_limits<std::int64_t>::min()};

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  // 0 once the input is used up.
  std::uint8_t byte() { return position_ < size_ ? data_[position_++] : std::uint8_t{0}; }
  bool rarely() { return byte() >= 0xe8; }
  std::int64_t small(std::int64_t high) { return byte() % (high + 1); }

  std::int64_t number() {
    const std::uint8_t kind = byte();
    if (kind < 0xc0) return kNastyNumbers[kind % kNastyNumbers.size()];
    std::uint64_t value = 0;
    for (int n = 0; n < 8; ++n) value = value << 8 | byte();
    return static_cast<std::int64_t>(value);
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t position_ = 0;
};

using Memory = std::unique_ptr<void, decltype(&std::free)>;

// Makes tensors and owns their memory.
class Tensors {
 public:
  explicit Tensors(Input& input) : input_(input) {}

  // As described, and now and then not quite.
  chiasma_tensor make(chiasma_dtype dtype, std::vector<std::int64_t> shape, bool random_contents) {
    const chiasma_device cpu = {CHIASMA_CPU, 0};
    chiasma_tensor tensor =
        chiasma_contiguous(nullptr, dtype, cpu, static_cast<std::int32_t>(shape.size()), shape.data());
    if (input_.rarely()) spoil(&tensor);
    if (input_.rarely()) spoil(&tensor);
    give_memory(&tensor, random_contents);
    return tensor;
  }

  // A cache of one of the formats, with padded pages or a head dimension at times.
  chiasma_tensor make_cache(chiasma_kv_format format, std::int64_t num_pages, std::int64_t page) {
    const bool is_bf16 = format == CHIASMA_KV_BF16 || format == CHIASMA_KV_BF16_NOPE;
    const std::int64_t width = chiasma_kv_width(format);
    const std::int64_t extent = width == 0 ? 656 : width;  // an unknown format has none
    const chiasma_device cpu = {CHIASMA_CPU, 0};
    const bool has_head = input_.rarely();
    const std::int64_t flat[] = {num_pages, page, extent};
    const std::int64_t with_head[] = {num_pages, page, 1, extent};
    chiasma_tensor tensor = chiasma_contiguous(nullptr, is_bf16 ? CHIASMA_BFLOAT16 : CHIASMA_UINT8, cpu,
                                               has_head ? 4 : 3, has_head ? with_head : flat);
    const std::int64_t per_16_bytes = is_bf16 ? 8 : 16;
    tensor.stride[0] =
        (page * extent + per_16_bytes - 1) / per_16_bytes * per_16_bytes + per_16_bytes * input_.small(2);
    if (input_.rarely()) spoil(&tensor);
    give_memory(&tensor, true);
    return tensor;
  }

 private:
  void spoil(chiasma_tensor* tensor) {
    const auto dim = static_cast<std::size_t>(input_.small(CHIASMA_MAX_RANK - 1));
    switch (input_.byte() % 7) {
      case 0: tensor->shape[dim] = input_.number(); break;
      case 1: tensor->stride[dim] = input_.number(); break;
      case 2: tensor->stride[dim] += input_.small(40) - 8; break;
      case 3: tensor->rank = static_cast<std::int32_t>(input_.number()); break;
      case 4: tensor->dtype = static_cast<chiasma_dtype>(input_.small(8) - 1); break;
      case 5: tensor->device.kind = static_cast<chiasma_device_kind>(input_.small(4)); break;
      default: tensor->device.index = static_cast<std::int32_t>(input_.number()); break;
    }
  }

  // Bytes that a tensor's elements lie in; more than kMaxTensorBytes if that is not a number worth having.
  static std::int64_t bytes_of(const chiasma_tensor& tensor) {
    constexpr std::int64_t kTooMany = kMaxTensorBytes + 1;
    if (tensor.rank < 0 || tensor.rank > CHIASMA_MAX_RANK) return kTooMany;
    __int128 span = 1;
    __int128 count = 1;
    for (int dim = 0; dim < tensor.rank; ++dim) {
      if (tensor.shape[dim] <= 0) return tensor.shape[dim] == 0 ? 0 : kTooMany;
      if (tensor.shape[dim] > 1) span += static_cast<__int128>(tensor.shape[dim] - 1) * tensor.stride[dim];
      count *= tensor.shape[dim];
      if (tensor.stride[dim] < 0 || span > kMaxTensorBytes || count > kMaxElements) return kTooMany;
    }
    const std::int64_t element = tensor.dtype == CHIASMA_UINT8      ? 1
                                 : tensor.dtype == CHIASMA_BFLOAT16 ? 2
                                 : tensor.dtype == CHIASMA_INT64    ? 8
                                                                    : 4;
    return static_cast<std::int64_t>(span) * element;
  }

  void give_memory(chiasma_tensor* tensor, bool random_contents) {
    const std::int64_t bytes = bytes_of(*tensor);
    if (bytes <= 0 || bytes > kMaxTensorBytes) return;
    owned_.emplace_back(std::malloc(static_cast<std::size_t>(bytes)), &std::free);
    tensor->data = owned_.back().get();
    std::memset(tensor->data, 0x38, static_cast<std::size_t>(bytes));
    if (!random_contents) return;
    auto* contents = static_cast<std::uint8_t*>(tensor->data);
    // A repeated run of input bytes: indices and lengths of any value.
    std::array<std::uint8_t, 16> run{};
    for (std::uint8_t& byte : run) byte = input_.byte();
    for (std::int64_t n = 0; n < bytes; ++n) contents[n] = run[static_cast<std::size_t>(n) % run.size()];
  }

  Input& input_;
  std::vector<Memory> owned_;
};

constexpr std::int64_t kFormats = 10;
constexpr std::int64_t kRope = 64;

// One of the formats; at times none.
chiasma_kv_format make_format(Input& input) {
  return static_cast<chiasma_kv_format>(input.rarely() ? input.small(kFormats + 2) - 1 : 1 + input.small(kFormats - 1));
}

bool has_second_cache(chiasma_kv_format format) {
  return format == CHIASMA_KV_V4 || format == CHIASMA_KV_V41 || format == CHIASMA_KV_V41_PLANE;
}

double make_kv_scale(Input& input, chiasma_kv_format format) {
  constexpr std::array<double, 8> kNasty = {-1.0,
                                            1e-40,
                                            1e39,
                                            1e300,
                                            0.5,
                                            1.0,
                                            std::numeric_limits<double>::infinity(),
                                            std::numeric_limits<double>::quiet_NaN()};
  if (input.rarely()) return kNasty[static_cast<std::size_t>(input.small(7))];
  return format == CHIASMA_KV_FP8 || format == CHIASMA_KV_FP8_NOPE ? 0.37 : 0.0;
}

// Columns of rows in one tensor or in two.
struct SplitColumns {
  bool is_split;
  std::int64_t columns;  // of the first
};

SplitColumns split_columns(Input& input, std::int64_t dim) {
  const bool is_split = input.byte() % 4 == 0;
  return {is_split, is_split ? dim - kRope : dim};
}

chiasma_decode_args make_decode(Input& input, Tensors& tensors) {
  chiasma_decode_args args = {};
  args.format = make_format(input);
  args.sm_scale = input.rarely() ? static_cast<double>(input.number()) * 1e30 : 0.04;
  args.kv_scale = make_kv_scale(input, args.format);
  const std::int64_t b = input.small(3);
  const std::int64_t s_q = 1 + input.small(1);
  const std::int64_t h_q = 1 + input.small(3);
  const std::int64_t topk = input.small(70);
  const SplitColumns split = split_columns(input, chiasma_kv_dim(args.format));
  args.q = tensors.make(CHIASMA_BFLOAT16, {b, s_q, h_q, split.columns}, true);
  if (split.is_split) args.q_rope = tensors.make(CHIASMA_BFLOAT16, {b, s_q, h_q, kRope}, true);
  args.kv_cache = tensors.make_cache(args.format, input.small(3), 1 + input.small(6));
  args.indices = tensors.make(CHIASMA_INT32, {b, s_q, topk}, true);
  const std::uint8_t options = input.byte();
  const auto make_lengths = [&] {
    return (options & 16) != 0 ? tensors.make(CHIASMA_INT32, {b, s_q}, true) : tensors.make(CHIASMA_INT32, {b}, true);
  };
  if ((options & 1) != 0) args.topk_length = make_lengths();
  if ((options & 2) != 0) args.attn_sink = tensors.make(CHIASMA_FLOAT32, {h_q}, true);
  if ((options & 4) != 0 && (has_second_cache(args.format) || input.rarely())) {
    args.extra_kv_cache = tensors.make_cache(args.format, input.small(3), 1 + input.small(6));
    args.extra_indices = tensors.make(CHIASMA_INT32, {b, s_q, input.small(40)}, true);
    if ((options & 8) != 0) args.extra_topk_length = make_lengths();
  }
  args.out = tensors.make(CHIASMA_BFLOAT16, {b, s_q, h_q, 512}, false);
  args.lse = tensors.make(CHIASMA_FLOAT32, {b, s_q, h_q}, false);
  return args;
}

chiasma_plan_options make_options(Input& input) {
  constexpr std::array<const char*, 4> kNames = {nullptr, "cpu_simd", "", "no such kernel"};
  chiasma_plan_options options = {};
  if (input.rarely()) options.kernel = kNames[static_cast<std::size_t>(input.small(3))];
  options.batch_invariant = input.byte() & 1;
  options.num_splits = static_cast<std::int32_t>(input.rarely() ? input.number() : input.small(9));
  options.num_threads = static_cast<std::int32_t>(input.rarely() ? input.number() : 1 + input.small(1));
  return options;
}

// A call that failed must say why.
void require_message(chiasma_status status) {
  if (status != CHIASMA_OK && std::strlen(chiasma_last_error()) == 0) std::abort();
}

void run_oracle(const chiasma_decode_args& args) {
  const std::int64_t rows = args.q.rank == 4 ? args.q.shape[0] * args.q.shape[1] : 0;
  std::vector<double> out(static_cast<std::size_t>(rows * args.q.shape[2] * 512));
  std::vector<double> lse(static_cast<std::size_t>(rows * args.q.shape[2]));
  require_message(chiasma_decode_oracle(&args, nullptr, rows, out.data(), lse.data(), nullptr, nullptr));
}

void fuzz_decode(Input& input) {
  Tensors tensors(input);
  const chiasma_decode_args args = make_decode(input, tensors);
  const chiasma_plan_options options = make_options(input);
  require_message(chiasma_kernel_check("cpu_simd", &args));
  chiasma_decode_plan* plan = nullptr;
  const chiasma_status planned = chiasma_decode_plan_create(&args, &options, &plan);
  require_message(planned);
  if ((planned == CHIASMA_OK) != (plan != nullptr)) std::abort();
  if (plan == nullptr) return;
  const std::size_t bytes = chiasma_decode_plan_workspace_bytes(plan);
  if (bytes > kMaxWorkspace) std::abort();
  // A little short at times, which must be refused.
  const std::size_t given = input.rarely() && bytes > 0 ? bytes - 1 : bytes;
  const std::size_t rounded = (bytes + kWorkspaceAlignment) / kWorkspaceAlignment * kWorkspaceAlignment;
  const Memory workspace(std::aligned_alloc(kWorkspaceAlignment, rounded), &std::free);
  const chiasma_status ran = chiasma_decode_run(plan, &args, workspace.get(), given, nullptr);
  require_message(ran);
  chiasma_decode_plan_destroy(plan);
  // What could be run has sane shapes, so the oracle's results can be allocated.
  if (ran == CHIASMA_OK) run_oracle(args);
}

void fuzz_merge(Input& input) {
  Tensors tensors(input);
  const std::int64_t parts = 1 + input.small(3);
  const std::int64_t b = input.small(2);
  const std::int64_t h = 1 + input.small(2);
  chiasma_merge_args args = {};
  args.part_out =
      tensors.make((input.byte() & 1) != 0 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, {parts, b, 1, h, 512}, true);
  args.part_lse = tensors.make(CHIASMA_FLOAT32, {parts, b, 1, h}, true);
  args.out = tensors.make((input.byte() & 1) != 0 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, {b, 1, h, 512}, false);
  args.lse = tensors.make(CHIASMA_FLOAT32, {b, 1, h}, false);
  args.plus_infinity_is_empty = input.byte() & 1;
  require_message(chiasma_merge(&args, nullptr));
}

void fuzz_quantize(Input& input) {
  Tensors tensors(input);
  const chiasma_kv_format format = make_format(input);
  const std::int64_t dim = chiasma_kv_dim(format);
  const std::int64_t num_pages = input.small(3);
  const std::int64_t page = 1 + input.small(5);
  const std::int64_t tokens = input.small(9);
  const SplitColumns split = split_columns(input, dim);
  chiasma_quantize_args args = {};
  args.format = format;
  args.scale = static_cast<chiasma_scale_mode>(input.rarely() ? input.small(4) : 1 + input.small(1));
  args.kv_scale = make_kv_scale(input, format);
  args.kv = tensors.make(CHIASMA_BFLOAT16, {tokens, split.columns}, true);
  if (split.is_split) args.rope = tensors.make(CHIASMA_BFLOAT16, {tokens, kRope}, true);
  if ((input.byte() & 1) != 0) args.slot_mapping = tensors.make(CHIASMA_INT64, {tokens}, true);
  args.kv_cache = tensors.make_cache(format, num_pages, page);
  if ((input.byte() & 1) != 0) args.nonfinite_count = tensors.make(CHIASMA_INT64, {1}, false);
  if ((input.byte() & 1) != 0) args.skipped_count = tensors.make(CHIASMA_INT64, {1}, false);
  require_message(chiasma_quantize(&args, nullptr));

  chiasma_dequantize_args back = {};
  back.format = format;
  back.kv_scale = args.kv_scale;
  back.kv_cache = args.kv_cache;
  back.kv = tensors.make((input.byte() & 1) != 0 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, {num_pages, page, dim}, false);
  require_message(chiasma_dequantize(&back, nullptr));
}

chiasma_dtype make_integers(Input& input) {
  return (input.byte() & 1) != 0 ? CHIASMA_INT64 : CHIASMA_INT32;
}

void fuzz_gather(Input& input) {
  Tensors tensors(input);
  const chiasma_kv_format format = make_format(input);
  const std::int64_t rows = input.small(9);
  const std::uint8_t options = input.byte();
  chiasma_gather_args args = {};
  args.format = format;
  args.kv_scale = make_kv_scale(input, format);
  args.kv_cache = tensors.make_cache(format, input.small(3), 1 + input.small(5));
  // By slots, by a table, and at times by both or by neither.
  const bool by_table = (options & 1) != 0;
  if (by_table == input.rarely()) args.slots = tensors.make(make_integers(input), {rows}, true);
  if (by_table) {
    const std::int64_t b = input.small(3);
    args.block_table = tensors.make(CHIASMA_INT32, {b, input.small(5)}, true);
    args.seq_lens = tensors.make(CHIASMA_INT32, {b}, true);
    args.starts = tensors.make(make_integers(input), {b}, true);
  }
  args.kv =
      tensors.make((options & 2) != 0 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, {rows, chiasma_kv_dim(format)}, false);
  require_message(chiasma_gather_dequantize(&args, nullptr));
}

void fuzz_translate(Input& input) {
  Tensors tensors(input);
  const std::int64_t b = input.small(3);
  const std::int64_t s_q = input.small(2);
  const std::int64_t topk = input.small(40);
  const std::uint8_t options = input.byte();
  const auto number = [&](std::int64_t usual) { return input.rarely() ? input.number() : usual; };
  chiasma_translate_args args = {};
  args.indices = tensors.make((options & 1) != 0 ? CHIASMA_INT64 : CHIASMA_INT32, {b, s_q, topk}, true);
  if ((options & 2) != 0) {
    const bool has_request = (options & 4) != 0;
    args.block_table = tensors.make(CHIASMA_INT32, {has_request ? input.small(3) : b, input.small(9)}, true);
    if (has_request) args.request = tensors.make(CHIASMA_INT32, {b}, true);
  }
  args.page = number(1 + input.small(70));
  if ((options & 8) != 0) {
    args.cp_world = static_cast<std::int32_t>(number(input.small(4)));
    args.cp_rank = static_cast<std::int32_t>(number(input.small(2)));
    args.cp_interleave = static_cast<std::int32_t>(number(input.small(5)));
  }
  args.slots = (options & 16) != 0 ? args.indices : tensors.make(CHIASMA_INT32, {b, s_q, topk}, false);
  require_message(chiasma_translate_indices(&args, nullptr));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  switch (input.byte() % 8) {
    case 4: fuzz_gather(input); break;
    case 5: fuzz_translate(input); break;
    case 6: fuzz_merge(input); break;
    case 7: fuzz_quantize(input); break;
    default: fuzz_decode(input); break;
  }
  return 0;
}
