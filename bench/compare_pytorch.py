#!/usr/bin/env python3
"""Times Chiasma's CPU decode against PyTorch doing the same job the usual way, in one process, alternating.

PyTorch's way: gather the selected rows, dequantise, append the RoPE part, matmul, softmax, matmul, everything in float32
or (dequantised K and V, matmuls) in bfloat16. It runs both as one batch and request by request, and its faster variant
counts. It is spared the log-sum-exp, which Chiasma delivers as well.

Before each timed call the process sleeps, so that no thread of the other side still spins, and makes one untimed call.
The multiply-add ceiling of the machine is measured in the same process between the others.

    cmake --build BUILD --target chiasma chiasma_fma_peak
    python3 bench/compare_pytorch.py --build BUILD [--json bench/results/cpu_decode_vs_pytorch.json]
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import threading
import time

import torch

KEY_DIM, NOPE_DIM, TILE_DIM, ROW_BYTES = 576, 512, 128, 656
HEADS, TOPK, PAGE, SLOTS = 128, 2048, 64, 65536
SM_SCALE = KEY_DIM**-0.5
UINT8, INT32, BFLOAT16, FLOAT32 = 1, 2, 4, 5
KV_V32 = 1
CPU = 1


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("index", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int),
        ("device", Device),
        ("shape", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
    ]


class DecodeArgs(ctypes.Structure):
    _fields_ = [("format", ctypes.c_int), ("sm_scale", ctypes.c_double), ("kv_scale", ctypes.c_double)] + [
        (name, Tensor)
        for name in (
            "q q_rope kv_cache indices topk_length attn_sink extra_kv_cache extra_indices extra_topk_length out lse"
        ).split()
    ]


class PlanOptions(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("batch_invariant", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("device_info", ctypes.c_void_p),
    ]


def describe(tensor, dtype):
    description = Tensor(tensor.data_ptr(), tensor.dim(), dtype, Device(CPU, 0))
    description.shape[: tensor.dim()] = tensor.shape
    description.stride[: tensor.dim()] = tensor.stride()
    return description


class Problem:
    """Random queries and a quantised pool (scale = amax / 448 of each tile); every request selects distinct rows."""

    def __init__(self, b):
        torch.manual_seed(1)
        self.q = torch.randn(b, 1, HEADS, KEY_DIM).bfloat16()
        kv = torch.randn(SLOTS, KEY_DIM)
        tiles = kv[:, :NOPE_DIM].view(SLOTS, -1, TILE_DIM)
        scales = tiles.abs().amax(-1) / 448
        codes = (tiles / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8).view(SLOTS, NOPE_DIM)
        rope = kv[:, NOPE_DIM:].bfloat16()
        self.pool = torch.cat([codes, scales.view(torch.uint8), rope.contiguous().view(torch.uint8)], 1).contiguous()
        self.indices = torch.stack([torch.randperm(SLOTS)[:TOPK] for _ in range(b)]).to(torch.int32).view(b, 1, TOPK)
        self.b = b


class Chiasma:
    def __init__(self, library, problem, threads):
        self.library = library
        self.out = torch.empty(problem.b, 1, HEADS, NOPE_DIM, dtype=torch.bfloat16)
        self.lse = torch.empty(problem.b, 1, HEADS)
        self.args = DecodeArgs(KV_V32, SM_SCALE)
        self.args.q = describe(problem.q, BFLOAT16)
        self.args.kv_cache = describe(problem.pool.view(SLOTS // PAGE, PAGE, ROW_BYTES), UINT8)
        self.args.indices = describe(problem.indices, INT32)
        self.args.out = describe(self.out, BFLOAT16)
        self.args.lse = describe(self.lse, FLOAT32)
        options = PlanOptions(num_threads=threads)
        self.plan = ctypes.c_void_p()
        self.check(library.chiasma_decode_plan_create(ctypes.byref(self.args), ctypes.byref(options), ctypes.byref(self.plan)))
        self.workspace_bytes = library.chiasma_decode_plan_workspace_bytes(self.plan)
        self.workspace = torch.empty(self.workspace_bytes + 256, dtype=torch.uint8)
        self.workspace_at = (self.workspace.data_ptr() + 255) // 256 * 256

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.library.chiasma_last_error().decode())

    def run(self):
        self.check(
            self.library.chiasma_decode_run(
                self.plan, ctypes.byref(self.args), self.workspace_at, self.workspace_bytes, None
            )
        )
        return self.out

    def oracle(self):
        out = torch.empty(self.out.shape, dtype=torch.float64)
        lse = torch.empty(self.lse.shape, dtype=torch.float64)
        self.check(
            self.library.chiasma_decode_oracle(
                ctypes.byref(self.args), None, out.shape[0], ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(lse.data_ptr()), None
            )
        )
        return out


def pytorch_decode(q, pool, indices, dtype):
    """q [b, h, 576], indices int64 [b, topk] -> [b, h, 512] bf16."""
    b, topk = indices.shape
    rows = pool.index_select(0, indices.view(-1))
    values = rows[:, :NOPE_DIM].view(torch.float8_e4m3fn).to(torch.float32).view(b * topk, -1, TILE_DIM)
    scales = rows[:, NOPE_DIM : NOPE_DIM + 16].contiguous().view(torch.float32)
    values = values.mul_(scales.unsqueeze(-1)).view(b * topk, NOPE_DIM).to(dtype)
    rope = rows[:, NOPE_DIM + 16 :].contiguous().view(torch.bfloat16).to(dtype)
    keys = torch.cat([values, rope], 1)
    if b == 1:  # plain matrices, which PyTorch multiplies faster than a batch of one
        scores = torch.matmul(q[0], keys.t()).float().mul_(SM_SCALE)
        return torch.matmul(torch.softmax(scores, -1).to(dtype), keys[:, :NOPE_DIM]).bfloat16().unsqueeze(0)
    keys = keys.view(b, topk, KEY_DIM)
    scores = torch.matmul(q, keys.transpose(1, 2)).float().mul_(SM_SCALE)
    return torch.matmul(torch.softmax(scores, -1).to(dtype), keys[:, :, :NOPE_DIM]).bfloat16()


def pytorch_methods(problem, dtype):
    indices = problem.indices.view(problem.b, TOPK).to(torch.int64)
    q = problem.q.view(problem.b, HEADS, KEY_DIM).to(dtype)

    def batched():
        return pytorch_decode(q, problem.pool, indices, dtype)

    def request_by_request():
        parts = [pytorch_decode(q[i : i + 1], problem.pool, indices[i : i + 1], dtype) for i in range(problem.b)]
        return torch.cat(parts)

    return {"batched": batched, "by request": request_by_request} if problem.b > 1 else {"batched": batched}


def measure_peak(library, threads):
    """Multiply-add GFLOP/s of all threads at once: the sum of what each achieves by its own clock, best of five tries."""

    def work(thread, rates):
        sink = ctypes.c_float(1.0)
        start = time.perf_counter()
        flops = library.chiasma_bench_fma_peak(ctypes.c_int64(2_000_000), ctypes.byref(sink))
        rates[thread] = flops / (time.perf_counter() - start) / 1e9

    totals = []
    for _ in range(5):
        rates = [0.0] * threads
        workers = [threading.Thread(target=work, args=(i, rates)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        totals.append(sum(rates))
    return max(totals)


def summary(samples):
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return {
        "n": len(samples),
        "median": round(statistics.median(samples), 4),
        "min": round(min(samples), 4),
        "p10": round(deciles[0], 4),
        "p90": round(deciles[-1], 4),
        "max": round(max(samples), 4),
    }


def timed_ms(method, pause):
    time.sleep(pause)
    method()
    start = time.perf_counter()
    method()
    return (time.perf_counter() - start) * 1e3


def max_relative_l2(out, reference):
    out = out.reshape(reference.shape).double()
    return float(((out - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def compare(libraries, b, threads, rounds, slow_rounds, pause):
    library, peak_library = libraries
    problem = Problem(b)
    chiasma = Chiasma(library, problem, threads)
    methods = {"chiasma": chiasma.run}
    for dtype in (torch.float32, torch.bfloat16):
        for variant, method in pytorch_methods(problem, dtype).items():
            methods[f"pytorch {str(dtype).removeprefix('torch.')} {variant}"] = method
    reference = chiasma.oracle()
    errors = {name: max_relative_l2(method(), reference) for name, method in methods.items()}

    times = {name: [] for name in methods}
    peaks = []
    for i in range(rounds):
        time.sleep(pause)
        peaks.append(measure_peak(peak_library, threads))
        for name, method in methods.items():
            if "bfloat16" not in name or i < slow_rounds:
                times[name].append(timed_ms(method, pause))

    flops = 2.0 * b * HEADS * TOPK * (KEY_DIM + NOPE_DIM)
    peak = max(peaks)
    results = {
        name: {"milliseconds": summary(times[name]), "max_relative_l2_error": float(f"{errors[name]:.3g}")}
        for name in methods
    }
    own = results["chiasma"]["milliseconds"]
    entry = {
        "case": f"decode b={b} h={HEADS} sq=1 topk={TOPK} fmt=v32 scale=amax page={PAGE} slots={SLOTS}",
        "workspace_bytes": chiasma.workspace_bytes,
        "fma_peak_gflops": summary(peaks),
        "chiasma_gflops": {key: round(flops / own[key] / 1e6, 1) for key in ("median", "min")},
        "chiasma_percent_of_peak": {key: round(flops / own[key] / 1e4 / peak, 1) for key in ("median", "min")},
        "results": results,
    }
    for dtype in ("float32", "bfloat16"):
        variants = [name for name in methods if name.startswith(f"pytorch {dtype} ")]
        rival = min(variants, key=lambda name: results[name]["milliseconds"]["median"])
        # Round by round, because the machine's speed drifts.
        ratios = [theirs / ours for theirs, ours in zip(times[rival], times["chiasma"])]
        entry[f"speedup_over_pytorch_{dtype}"] = {
            "rival": rival,
            "of_medians": round(results[rival]["milliseconds"]["median"] / own["median"], 2),
            "of_minima": round(results[rival]["milliseconds"]["min"] / own["min"], 2),
            "by_round": summary(ratios),
        }
    return entry


def command_output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cpu_model():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="build folder with the targets chiasma and chiasma_fma_peak")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=40, help="timed calls of each method")
    parser.add_argument("--slow-rounds", type=int, default=8, help="timed calls of the bfloat16 methods")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of sleep before each timed call")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    library = ctypes.CDLL(os.path.join(options.build, "src", "libchiasma.so"))
    library.chiasma_last_error.restype = ctypes.c_char_p
    library.chiasma_version.restype = ctypes.c_char_p
    library.chiasma_decode_plan_workspace_bytes.restype = ctypes.c_size_t
    library.chiasma_decode_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.chiasma_decode_oracle.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64] + [ctypes.c_void_p] * 4
    peak_library = ctypes.CDLL(os.path.join(options.build, "bench", "libchiasma_fma_peak.so"))
    peak_library.chiasma_bench_fma_peak.restype = ctypes.c_int64

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    load_before = os.getloadavg()
    cases = [
        compare((library, peak_library), b, options.threads, options.rounds, options.slow_rounds, options.pause)
        for b in (1, 8)
    ]
    report = {
        "what": "CPU decode against PyTorch: gather, dequantise, matmul, softmax, matmul",
        "cpu": cpu_model(),
        "threads": options.threads,
        "commit": command_output("git", "-C", root, "describe", "--always", "--abbrev=40", "--dirty"),
        "versions": {
            "chiasma": library.chiasma_version().decode(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "load_average_before_and_after": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
        "date": time.strftime("%Y-%m-%d"),
        "cases": cases,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
