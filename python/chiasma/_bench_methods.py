"""What python -m chiasma.bench compares: the problem, the methods that decode it, and float64 to hold them against."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import chiasma

KEY_DIM, VALUE_DIM, TILE, ROW_BYTES = 576, 512, 128, 656
SM_SCALE = KEY_DIM**-0.5
CHECKED_REQUESTS = 4

Method = Callable[[], torch.Tensor]


@dataclass
class Problem:
    q: torch.Tensor  # bf16 [b, 1, heads, 576]
    cache: torch.Tensor  # uint8 [pages, page, 656]
    indices: torch.Tensor  # int32 [b, 1, topk]


@dataclass
class Case:
    """What was decoded, and what each method made of it."""

    heads: int
    batch: int
    topk: int
    page: int
    pool: int
    scale: str
    kernel: str = ""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)


def make_problem(case: Case, device: torch.device) -> Problem:
    """Normally distributed rows, quantised in pieces; each request selects from a pool of its own."""
    generator = torch.Generator(device=device).manual_seed(1)
    pages_of_pool = -(-case.pool // case.page)
    cache = torch.empty(case.batch * pages_of_pool, case.page, ROW_BYTES, dtype=torch.uint8, device=device)
    piece = max(1, 65536 // case.page)
    for first in range(0, len(cache), piece):
        pages = cache[first : first + piece]
        kv = torch.randn(*pages.shape[:2], KEY_DIM, generator=generator, device=device).bfloat16()
        chiasma.quantize(kv, scale=case.scale, out=pages)
    q = torch.randn(case.batch, 1, case.heads, KEY_DIM, generator=generator, device=device).bfloat16()
    slots = pages_of_pool * case.page
    indices = torch.randint(slots, (case.batch, 1, case.topk), generator=generator, device=device)
    indices += slots * torch.arange(case.batch, device=device)[:, None, None]
    return Problem(q, cache, indices.int())


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """Cache rows [n, 656] as float32 [n, 576]."""
    codes = rows[:, :VALUE_DIM].contiguous().view(torch.float8_e4m3fn).float().view(len(rows), -1, TILE)
    scales = rows[:, VALUE_DIM : VALUE_DIM + 16].contiguous().view(torch.float32)
    rope = rows[:, VALUE_DIM + 16 :].contiguous().view(torch.bfloat16).float()
    return torch.cat([(codes * scales[..., None]).flatten(1), rope], 1)


def chiasma_method(problem: Problem) -> Method:
    b, s_q, heads, _ = problem.q.shape
    out = torch.empty(b, s_q, heads, VALUE_DIM, dtype=torch.bfloat16, device=problem.q.device)
    lse = torch.empty(b, s_q, heads, device=problem.q.device)

    def run() -> torch.Tensor:
        chiasma.decode(problem.q, problem.cache, problem.indices, out=out, lse=lse)
        return out

    return run


def pytorch_method(problem: Problem) -> Method:
    dtype = torch.bfloat16 if problem.q.device.type == "cuda" else torch.float32
    pool = problem.cache.view(-1, ROW_BYTES)
    b, topk = problem.indices.shape[0], problem.indices.shape[2]

    def run() -> torch.Tensor:
        keys = dequantize_rows(pool.index_select(0, problem.indices.flatten())).to(dtype).view(b, topk, KEY_DIM)
        scores = torch.matmul(problem.q[:, 0].to(dtype), keys.transpose(1, 2)).float() * SM_SCALE
        return torch.matmul(scores.softmax(-1).to(dtype), keys[..., :VALUE_DIM]).bfloat16()[:, None]

    return run


def flash_mla_method(problem: Problem) -> Method:
    """As engines call it: heads padded with zeros to the 64 or 128 that it takes."""
    import flash_mla  # type: ignore[import-not-found, unused-ignore]

    heads = problem.q.shape[2]
    padded = 64 if heads <= 64 else 128
    q = torch.nn.functional.pad(problem.q, (0, 0, 0, padded - heads))
    lengths = torch.full((len(q),), problem.indices.shape[2], dtype=torch.int32, device=q.device)
    try:
        metadata, num_splits = flash_mla.get_mla_metadata(
            lengths, padded, 1, num_heads_q=padded, is_fp8_kvcache=True, topk=problem.indices.shape[2]
        )
    except TypeError:
        metadata, num_splits = flash_mla.get_mla_metadata()

    def run() -> torch.Tensor:
        out, _ = flash_mla.flash_mla_with_kvcache(
            q, problem.cache.unsqueeze(2), None, lengths, VALUE_DIM, metadata, num_splits,
            softmax_scale=SM_SCALE, is_fp8_kvcache=True, indices=problem.indices,
        )  # fmt: skip
        return out[:, :, :heads]  # type: ignore[no-any-return, unused-ignore]

    return run


def has_flash_mla() -> bool:
    loaded = sys.modules.get("flash_mla")
    if loaded is not None:
        return loaded.__name__ != "chiasma.compat.flash_mla"
    return importlib.util.find_spec("flash_mla") is not None


def reference(problem: Problem, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 out [heads, 512] and lse [heads] of one request, from the stored bytes."""
    rows = problem.cache.view(-1, ROW_BYTES)[problem.indices[request, 0].long()]
    # float32 holds a code times its scale to 2^-24, far below what is asked here.
    keys = dequantize_rows(rows).double()
    scores = problem.q[request, 0].double() @ keys.T * SM_SCALE
    return scores.softmax(-1) @ keys[:, :VALUE_DIM], scores.logsumexp(-1)


def error_of(out: torch.Tensor, problem: Problem) -> float:
    """The largest relative L2 error of a head, over some requests."""
    worst = 0.0
    for request in range(min(len(out), CHECKED_REQUESTS)):
        want, _ = reference(problem, request)
        error = (out[request, 0].double() - want).norm(dim=-1) / want.norm(dim=-1)
        worst = max(worst, error.nan_to_num(math.inf).max().item())
    return worst


def lse_error(problem: Problem) -> float:
    _, lse = chiasma.decode(problem.q, problem.cache, problem.indices)
    want = torch.stack([reference(problem, i)[1] for i in range(min(len(lse), CHECKED_REQUESTS))])
    error = (lse[: len(want), 0].double() - want).abs() / want.abs().clamp(min=1.0)
    return float(error.nan_to_num(math.inf).max())
