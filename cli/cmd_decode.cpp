// `chiasma decode`: attention over the tensors of a file.
#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/decode_input.h"
#include "cli/decode_job.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cli/progress.h"
#include "cli/safetensors.h"

namespace chiasma::cli {
namespace {

constexpr const char* kDescription = R"(Sparse MLA decoding attention over the tensors of a safetensors file.

Input tensors (b requests, s_q query tokens each, h_q heads, topk selected KV tokens per query token):
  q            BF16 [b, s_q, h_q, d_qk]; d_qk is 576 for v32, fp8 and bf16, 512 for the other
               formats; h_q 1..128; RoPE part last
  q_rope       optional BF16 [b, s_q, h_q, 64]: the RoPE part, which q then lacks
  kv_cache     U8, I8 or F8_E4M3 [num_pages, page, width]; a width of 656 is v32 and 584 v4, other
               formats are named in metadata "format"; [slots, width], too, and
               [num_pages, bytes per page] with metadata "page": tokens per page
               bf16: BF16 [num_pages, page, 576], bf16nope: 512
               (a head dimension of 1 before the last is fine)
  indices      I32 or I64 [b, s_q, topk]; slots, page_index * page + offset; anything
               outside the cache, such as -1, is masked
  topk_length  optional I32 or I64 [b] or [b, s_q]; how many leftmost indices count
  attn_sink    optional F32 [h_q]
  extra_kv_cache, extra_indices, extra_topk_length
               optional second cache (v4, v41, v41plane), with metadata "extra_page" if 2-D
With one query token a request, q may be [b, h_q, d_qk] and indices [b, topk]; out and lse then
lack that dimension, too.
Metadata: "format", "kv_scale" (fp8, fp8nope) and "sm_scale", the last also as a tensor of one number.

Output tensors: out BF16 [b, s_q, h_q, 512] and lse F32 [b, s_q, h_q] (natural logarithm; a row
without a valid index gives out 0 and lse -inf). Metadata: kernel, version, sm_scale, attn_sink
("applied" or "none").)";

constexpr const char* kExample = R"(Example, from PyTorch:
  from safetensors.torch import load_file, save_file
  save_file({"q": q, "kv_cache": cache.view(torch.uint8), "indices": indices.int()},
            "in.safetensors", metadata={"sm_scale": str(sm_scale)})
  # chiasma decode --input in.safetensors --output out.safetensors
  out = load_file("out.safetensors")["out"]
`chiasma quantize` makes kv_cache from bf16 values.)";

struct Options {
  std::string input, output, device = "auto";
  DecodeInputOptions reading;
  bool strict = false;
  DecodeJobOptions job;
};

void write_results(const SafetensorsFile& file, SafetensorsWriter& writer, DecodeJob& job) {
  writer.write(job.lse());
  writer.write(job.out());
  file.check_length();
  writer.commit();
}

// A planned job and the device it is on.
struct PlacedJob {
  std::unique_ptr<harness::Device> device;
  std::unique_ptr<DecodeJob> job;
};

PlacedJob place_job(const std::string& device, const SafetensorsFile& file, const DecodeInput& input,
                    const Options& options) {
  PlacedJob placed;
  placed.device = open_device(device, options.job.kernel);
  DecodeJobOptions job_options = options.job;
  job_options.release = [&file](std::span<const std::byte> part) { file.release(part); };
  placed.job = std::make_unique<DecodeJob>(input.args(), input.tensors(), *placed.device, job_options, options.input);
  return placed;
}

// "auto" is the best device that can do this call: a GPU without a kernel for it is passed over.
PlacedJob place_job_where_possible(const SafetensorsFile& file, const DecodeInput& input, const Options& options) {
  try {
    return place_job(options.device, file, input, options);
  } catch (const CommandError& error) {
    const bool may_fall_back = options.device == "auto" && options.job.kernel.empty() &&
                               error.exit_code() == kExitUnavailable && chiasma_cuda_available() == CHIASMA_OK;
    if (!may_fall_back) throw;
    fmt::print(stderr, "chiasma: note: {}; decoding on the CPU instead\n", error.what());
    return place_job("cpu", file, input, options);
  }
}

void run_decode_command(const Options& options) {
  const SafetensorsFile file = SafetensorsFile::open(options.input);
  const DecodeInput input(file, options.reading);
  if (options.strict && !input.notes().empty()) fail_input("{} (--strict)", fmt::join(input.notes(), "\n"));
  for (const std::string& note : input.notes()) fmt::print(stderr, "chiasma: note: {}\n", note);
  for (const std::string& conversion : input.conversions()) fmt::print(stderr, "chiasma: note: {}\n", conversion);
  const PlacedJob placed = place_job_where_possible(file, input, options);
  DecodeJob& job = *placed.job;

  // The output's place is tried before the work is done.
  const chiasma_tensor& q = input.args().q;
  SafetensorsWriter writer;
  writer.set_metadata({{"kernel", job.kernel()},
                       {"version", chiasma_version()},
                       {"sm_scale", fmt::format("{}", input.args().sm_scale)},
                       {kSinkKey, input.args().attn_sink.rank != 0 ? kSinkApplied : "none"}});
  std::vector<std::int64_t> shape{q.shape[0], q.shape[1], q.shape[2]};
  if (input.is_flat()) shape = {q.shape[0], q.shape[2]};
  writer.declare("lse", Dtype::kF32, shape);
  shape.push_back(kOutputWidth);
  writer.declare("out", Dtype::kBF16, shape);
  writer.begin(options.output);
  {
    const Progress progress(fmt::format("decoding {} x {} query tokens", q.shape[0], q.shape[1]));
    job.run();
  }
  write_results(file, writer, job);
}

}  // namespace

void register_decode(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("decode", "Attention over the tensors of a safetensors file");
  command->description(kDescription);
  command->footer(kExample);
  command->add_option("--input", options->input, "safetensors file with the tensors above")->required();
  command->add_option("--output", options->output, "safetensors file to write; replaced only when complete")
      ->required();
  command->add_option("--device", options->device, kDeviceHelp)->capture_default_str();
  command->add_option("--kernel", options->job.kernel, "a name from `chiasma info`; by default the best that fits");
  command->add_option("--sm-scale", options->reading.sm_scale,
                      "softmax scale; by default the file's sm_scale, else d_qk^-1/2");
  command->add_flag("--strict", options->strict,
                    "refuse a file without sm_scale, or with tensors that decode does not use");
  command->add_flag("--cast", options->reading.cast,
                    "convert q and q_rope from F32 or F16, attn_sink from F16 or BF16");
  command->add_flag("--batch-invariant", options->job.batch_invariant,
                    "a request's result does not depend on what else is in the batch");
  command->callback([options, &exit_code] {
    run_decode_command(*options);
    exit_code = kExitOk;
  });
}

}  // namespace chiasma::cli
