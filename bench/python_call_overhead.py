#!/usr/bin/env python3
"""What chiasma.decode() costs its caller above the C interface's chiasma_decode_run(), in host time.

On the CPU the batch is empty, so that no attention is computed and nothing but the call is left. On a GPU the batch is
small, calls are only queued, and the queue is emptied between rounds, outside of the time. Variants alternate; a
variant's time is the median of its rounds. The C call goes through ctypes, whose own cost, measured with a function
that does nothing, is taken off.

    cmake --build BUILD --target chiasma
    python3 bench/python_call_overhead.py --library BUILD/src/libchiasma.so [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

import chiasma

UINT8, INT32, BFLOAT16, FLOAT32 = 1, 2, 4, 5
DTYPES = {torch.uint8: UINT8, torch.int32: INT32, torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
KV_V32 = 1
NAMES = (
    "q", "q_rope", "kv_cache", "indices", "topk_length", "attn_sink", "extra_kv_cache", "extra_indices",
    "extra_topk_length", "out", "lse",
)  # fmt: skip


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int),
        ("device_kind", ctypes.c_int),
        ("device_index", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
    ]


class DecodeArgs(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_int),
        ("sm_scale", ctypes.c_double),
        ("kv_scale", ctypes.c_double),
    ] + [(name, Tensor) for name in NAMES]


def c_tensor(tensor: torch.Tensor) -> Tensor:
    result = Tensor(tensor.data_ptr(), tensor.dim(), DTYPES[tensor.dtype], 2 if tensor.is_cuda else 1, 0)
    result.shape[: tensor.dim()] = list(tensor.shape)
    result.stride[: tensor.dim()] = list(tensor.stride())
    return result


def c_calls(path: str, tensors: dict[str, torch.Tensor], workspace: torch.Tensor) -> tuple[Callable[[], Any], ...]:
    """The C call, and a call of something that does nothing."""
    library = ctypes.CDLL(path)
    library.chiasma_last_error.restype = ctypes.c_char_p
    args = DecodeArgs(KV_V32, 576**-0.5, 0.0, *(c_tensor(tensors[name]) if name in tensors else Tensor() for name in NAMES))
    plan = ctypes.c_void_p()
    if library.chiasma_decode_plan_create(ctypes.byref(args), None, ctypes.byref(plan)) != 0:
        raise RuntimeError(library.chiasma_last_error().decode())
    run = library.chiasma_decode_run
    nothing = library.chiasma_status_name  # a switch; it looks at its first argument alone
    num_bytes = ctypes.c_size_t(workspace.numel())
    address = ctypes.c_void_p(workspace.data_ptr())
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if workspace.is_cuda else None)
    reference = ctypes.byref(args)
    if run(plan, reference, address, num_bytes, stream) != 0:
        raise RuntimeError(library.chiasma_last_error().decode())
    arguments = (plan, reference, address, num_bytes, stream)
    return lambda: run(*arguments), lambda: nothing(*arguments)


def variants(library: str, device: str) -> dict[str, Callable[[], Any]]:
    b = 1 if device == "cuda" else 0
    q = torch.randn(b, 1, 16, 576, device=device).bfloat16()
    cache = torch.zeros(4, 64, 656, dtype=torch.uint8, device=device)
    indices = torch.zeros(b, 1, 64, dtype=torch.int32, device=device)
    wide = indices.long()
    out = torch.empty(b, 1, 16, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(b, 1, 16, device=device)
    needed = chiasma.plan(q, cache, indices).workspace_bytes
    scratch = torch.empty(needed + 256, dtype=torch.uint8, device=device)
    scratch = scratch[-scratch.data_ptr() % 256 :]
    tensors = {"q": q, "kv_cache": cache, "indices": indices, "out": out, "lse": lse}
    run, nothing = c_calls(library, tensors, scratch)
    decode = chiasma.decode

    def two_new_tensors() -> tuple[torch.Tensor, torch.Tensor]:
        return q.new_empty((b, 1, 16, 512)), q.new_empty((b, 1, 16), dtype=torch.float32)

    return {
        "ctypes, nothing": nothing,
        "ctypes, chiasma_decode_run": run,
        "out, lse and workspace given": lambda: decode(q, cache, indices, out=out, lse=lse, workspace=scratch),
        "out and lse given": lambda: decode(q, cache, indices, out=out, lse=lse),
        "workspace given": lambda: decode(q, cache, indices, workspace=scratch),
        "nothing given": lambda: decode(q, cache, indices),
        "nothing given, int64 indices": lambda: decode(q, cache, wide),
        "nothing given, torch.ops.chiasma.decode": lambda: torch.ops.chiasma.decode(q, None, cache, indices),
        "two new tensors by PyTorch": two_new_tensors,
    }


def measure(calls: dict[str, Callable[[], Any]], device: str, rounds: int, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            elapsed = time.perf_counter() - begin
            if device == "cuda":
                torch.cuda.synchronize()
            if number > 0:  # the first round warms up
                times[name].append(elapsed / repeats * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libchiasma.so of the same build")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--repeats", type=int, default=200, help="calls of a round; fewer than fit into a GPU's queue")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    with torch.inference_mode():
        times = measure(variants(options.library, options.device), options.device, options.rounds, options.repeats)
    c_call = times["ctypes, chiasma_decode_run"] - times["ctypes, nothing"]
    for name, us in times.items():
        above = "" if name.startswith(("ctypes", "two")) else f"{us - c_call:8.2f} above the C call"
        print(f"{name:42}{us:8.2f} us{above}")
    print(f"{'the C call':42}{c_call:8.2f} us")
    if options.json:
        result = {
            "what": "host time of a decode call through Python, median over rounds, us",
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "cpu": next((d.name for d in chiasma.devices() if d.device == "cpu"), ""),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "apache-tvm-ffi": version("apache-tvm-ffi"),
            "chiasma": chiasma.__version__,
            "rounds": options.rounds,
            "calls_a_round": options.repeats,
            "c_call_us": c_call,
            "us": times,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
