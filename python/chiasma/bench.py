"""Times chiasma.decode() against plain PyTorch, and against flash_mla where that can be imported.

    python -m chiasma.bench                                       the GPU if there is one, else the CPU
    python -m chiasma.bench --device cpu --heads 16 --batch 1,8
    python -m chiasma.bench --heads 8,16,128 --batch 1,4,16,64,128 --json out.json --plot out.png

Every method decodes the same bytes. Each result is first held against float64 for some requests, and what is wrong
is not timed. Methods take turns. On a GPU the times are the device's own, between two events, with the call queued
behind a pause so that Python's time does not count: "warm" after an untimed call of the same method, "cold" after the
L2 cache was overwritten. On a CPU they are wall-clock times, warm. The plain PyTorch method gathers the selected rows,
dequantises them, and does matmul, softmax, matmul: in bfloat16 on a GPU, in float32 on a CPU, the faster type there.

Exit status: 0, 1 if a result of chiasma was wrong, 2 for wrong options, 3 if the device cannot do it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import chiasma
from chiasma import _bench_methods as bench
from chiasma._bench_methods import Case, Method

# Largest relative L2 error of a row. Rounding to bf16 costs up to 3.9e-3 by itself where one value rules.
BOUND, RIVAL_BOUND = 4e-3, 1e-2
LSE_BOUND = 5e-4
MIN_SAMPLES = 5
FLUSH_BYTES = 256 << 20
PAUSE_CYCLES = 2_000_000

def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def time_on_cuda(method: Method, before: Callable[[], Any]) -> float:
    new_event: Any = torch.cuda.Event
    start, end = new_event(enable_timing=True), new_event(enable_timing=True)
    before()
    torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]
    start.record()
    method()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def time_on_cpu(method: Method, before: Callable[[], Any]) -> float:
    before()
    start = time.perf_counter()
    method()
    return (time.perf_counter() - start) * 1e6


def summary(samples: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    values = {"median": statistics.median(samples), "min": min(samples), "p10": deciles[0], "p90": deciles[-1]}
    return {name: round(value, 3) for name, value in values.items()} | {"n": len(samples)}


def measure(methods: dict[str, Method], device: torch.device, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Microseconds of each method, in turns, until there are enough rounds or the time is up."""
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
    flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    started = time.monotonic()
    for done in range(rounds):
        if done >= MIN_SAMPLES and time.monotonic() - started > seconds:
            break
        for name, method in methods.items():
            if device.type == "cuda":
                samples[name].setdefault("warm", []).append(time_on_cuda(method, method))
                samples[name].setdefault("cold", []).append(time_on_cuda(method, flush.zero_))
            else:
                samples[name].setdefault("warm", []).append(time_on_cpu(method, method))
    return {name: {kind: summary(times) for kind, times in kinds.items()} for name, kinds in samples.items()}


def run_case(case: Case, device: torch.device, rounds: int, seconds: float) -> bool:
    """Checks, then times. False if chiasma's own result is wrong; then nothing was timed."""
    problem = bench.make_problem(case, device)
    case.kernel = chiasma.plan(problem.q, problem.cache, problem.indices).kernel
    makers = {"chiasma": bench.chiasma_method, "pytorch": bench.pytorch_method}
    if device.type == "cuda" and bench.has_flash_mla():
        makers["flash_mla"] = bench.flash_mla_method
    methods: dict[str, Method] = {}
    for name, make in makers.items():
        try:
            method = make(problem)
            error = bench.error_of(method(), problem)
        except Exception as failure:
            if name == "chiasma":
                raise
            case.results[name] = {"failed": f"{type(failure).__name__}: {failure}"}
            continue
        case.results[name] = {"max_relative_l2_error": float(f"{error:.3g}")}
        if error <= (BOUND if name == "chiasma" else RIVAL_BOUND):
            methods[name] = method
        else:
            case.results[name]["failed"] = "wrong result, not timed"
    if "chiasma" not in methods or bench.lse_error(problem) > LSE_BOUND:
        case.results["chiasma"]["failed"] = "wrong result, not timed"
        return False
    for name, times in measure(methods, device, rounds, seconds).items():
        case.results[name]["microseconds"] = times
    return True


def command_output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions; None for what cannot be found out."""
    on_gpu = device.type == "cuda"
    folder = str(Path(__file__).resolve().parent)
    commit = None
    if command_output("git", "-C", folder, "ls-files", "--", __file__) is not None:  # not some repository around it
        commit = command_output("git", "-C", folder, "describe", "--always", "--abbrev=40", "--dirty")
    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None
    return {
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "threads": None if on_gpu else torch.get_num_threads(),
        "chiasma": chiasma.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def print_table(cases: list[Case]) -> None:
    columns = "".join(f"{name:>11}" for name in ("median us", "min", "p10", "p90"))
    print(f"{'heads':>5} {'batch':>5} {'topk':>5}  {'method':<10} {'error':>8}     {columns} {'n':>5}")
    for case in cases:
        for name, result in case.results.items():
            head = f"{case.heads:>5} {case.batch:>5} {case.topk:>5}  {name:<10}"
            error = f"{result.get('max_relative_l2_error', math.nan):>8.2g}"
            if "failed" in result:
                print(head, error, result["failed"].splitlines()[0][:100])
            for kind, t in result.get("microseconds", {}).items():
                times = "".join(f"{t[key]:>11.1f}" for key in ("median", "min", "p10", "p90"))
                print(f"{head} {error} {kind:<4}{times} {t['n']:>5}")


def draw(cases: list[Case], title: str, path: str) -> None:
    """Median warm time over the batch, a line for each method and number of heads."""
    import matplotlib  # type: ignore[import-not-found, import-untyped, unused-ignore]

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # type: ignore[import-not-found, import-untyped, unused-ignore]

    lines: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        for name, result in case.results.items():
            if "microseconds" in result:
                point = (case.batch, result["microseconds"]["warm"]["median"])
                lines.setdefault(f"{name}, {case.heads} heads", []).append(point)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="median time, microseconds", title=title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be 1 or more")
    return value


def positive_list(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chiasma.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--heads", type=positive_list, default=[128], help="1 to 128; several parted by commas")
    parser.add_argument("--batch", type=positive_list, default=[1, 8], help="requests; several parted by commas")
    parser.add_argument("--topk", type=positive, default=2048, help="entries of a row (default 2048)")
    parser.add_argument("--page", type=positive, default=64, help="tokens of a page (default 64)")
    parser.add_argument("--pool", type=positive, help="tokens of a request's pool (default 16384, on a CPU 4096)")
    parser.add_argument("--scale", choices=["pow2", "amax"], default="amax", help="scales of the cache (default amax)")
    parser.add_argument("--rounds", type=positive, default=50, help="timed calls of each method (default 50)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help=f"start no round after this time, from round {MIN_SAMPLES} on"
    )
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, cases and times")
    parser.add_argument("--plot", metavar="FILE", help="draw times over the batch; needs matplotlib")
    return parser


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, torch.device]:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if max(options.heads) > 128:
        parser.error(f"--heads {max(options.heads)}: at most 128")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device {options.device}: must be cpu, cuda or cuda:N")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device {options.device}: must be cpu, cuda or cuda:N")
    if options.pool is None:
        options.pool = 16384 if device.type == "cuda" else 4096
    return options, device


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options, device = parse(arguments)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        say(f"--device {options.device}: there are {torch.cuda.device_count()} CUDA devices")
        return 3
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    cases = [
        Case(heads, batch, options.topk, options.page, options.pool, options.scale)
        for heads in options.heads
        for batch in options.batch
    ]
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.heads} heads, {case.batch} requests, topk {case.topk} ...")
        try:
            right = run_case(case, device, options.rounds, options.seconds)
        except NotImplementedError as missing:
            say(str(missing))
            return 3
        if not right:
            print_table(cases[:number])
            say("chiasma's result is wrong by more than the bound; nothing of this case was timed")
            return 1
    print_table(cases)
    about = environment(device)
    if options.json:
        report = about | {"unit": "microseconds", "cases": [asdict(case) for case in cases]}
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        draw(cases, f"{about['gpu'] or 'CPU'}, topk {options.topk}", options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
