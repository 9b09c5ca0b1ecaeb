"""What the Python tests hold results against: caches made byte by byte, float64 attention over the stored bytes, and
the comparison by the tolerances of docs/numerics.md. Plain PyTorch; nothing here calls the library."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Formats that each kind of device has a decode kernel for. Tests of the others expect NotImplementedError.
DECODE_FORMATS = {"cpu": ("v32", "v4", "bf16"), "cuda": ("v32",)}

KEY_DIM = {"v32": 576, "v4": 512, "bf16": 576}
TOKEN_BYTES = {"v32": 656, "v4": 584}
NAN_CODE = 0x7F


# ---- Caches ----


def page_bytes(fmt: str, page: int) -> int:
    """What writers give a page: v4 pads it to a multiple of 576 bytes."""
    return page * 656 if fmt == "v32" else -(-page * 584 // 576) * 576


def quantize_tile(values: torch.Tensor, scale_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """values [..., n] float32 -> (e4m3 codes [..., n] uint8, scale [...] float32), for finite values."""
    amax = values.abs().amax(-1)
    if scale_mode == "pow2":
        # frexp: amax / 448 = m * 2^e with 0.5 <= m < 1, so that the next power of two is 2^e, or 2^(e-1) if m is 0.5.
        mantissa, exponent = torch.frexp(torch.clamp(amax.double() / 448, min=1e-4))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).float()
    else:
        scale = torch.where(amax > 0, amax / 448, torch.finfo(torch.float32).tiny)
    codes = (values / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    zero = (amax == 0)[..., None]
    return torch.where(zero, torch.zeros_like(codes), codes), scale


def quantize(kv: torch.Tensor, fmt: str, scale_mode: str = "pow2", extra_page_bytes: int = 0) -> torch.Tensor:
    """kv bf16 [pages, page, d_qk] -> cache of the given format, its page stride larger by extra_page_bytes. The bytes
    between pages are NaN codes."""
    pages, page, _ = kv.shape
    if fmt == "bf16":
        stride = page * 576 + extra_page_bytes // 2
        store = torch.full((pages * stride,), math.nan, dtype=torch.bfloat16)
        cache = store.as_strided((pages, page, 576), (stride, 576, 1))
        cache.copy_(kv)
        return cache
    stride = page_bytes(fmt, page) + extra_page_bytes
    store = torch.full((pages * stride,), NAN_CODE, dtype=torch.uint8)
    nope, tile = (512, 128) if fmt == "v32" else (448, 64)
    codes, scales = quantize_tile(kv[..., :nope].float().view(pages, page, -1, tile), scale_mode)
    codes, rope = codes.view(pages, page, nope), kv[..., nope:].contiguous().view(torch.uint8)
    if fmt == "v32":
        rows = torch.cat([codes, scales.contiguous().view(torch.uint8).view(pages, page, 16), rope], -1)
        cache = store.as_strided((pages, page, 656), (stride, 656, 1))
        cache.copy_(rows)
        return cache
    store.as_strided((pages, page * 576), (stride, 1)).copy_(torch.cat([codes, rope], -1).view(pages, -1))
    exponents = torch.frexp(scales)[1].to(torch.int32) - 1 + 127
    tail = torch.cat([exponents.to(torch.uint8), torch.zeros(pages, page, 1, dtype=torch.uint8)], -1)
    store.as_strided((pages, page * 8), (stride, 1), page * 576).copy_(tail.view(pages, -1))
    return store.as_strided((pages, page, 584), (stride, 584, 1))


def key_rows(cache: torch.Tensor, fmt: str) -> torch.Tensor:
    """The stored numbers of every slot, exactly: float64 [pages * page, d_qk]."""
    cache = cache.cpu()
    if cache.dim() == 4:
        cache = cache[:, :, 0]
    pages, page = cache.shape[:2]
    if fmt == "bf16":
        return cache.double().reshape(pages * page, 576)
    if cache.dtype != torch.uint8:
        cache = cache.view(torch.uint8)
    if fmt == "v32":
        rows = cache.reshape(pages * page, 656)
        codes, scales, rope = rows[:, :512], rows[:, 512:528].contiguous().view(torch.float32).double(), rows[:, 528:]
    else:
        flat = cache.as_strided((pages, page * 584), (cache.stride(0), 1))
        rows = flat[:, : page * 576].reshape(pages * page, 576)
        exponents = flat[:, page * 576 :].reshape(pages * page, 8)[:, :7].double()
        scales = torch.where(exponents == 255, math.nan, torch.exp2(exponents - 127))
        codes, rope = rows[:, :448], rows[:, 448:]
    values = codes.contiguous().view(torch.float8_e4m3fn).float().double()
    values = values.view(len(rows), scales.shape[1], -1) * scales[..., None]
    return torch.cat([values.flatten(1), rope.contiguous().view(torch.bfloat16).double()], 1)


def move_cache(cache: torch.Tensor, device: str) -> torch.Tensor:
    """The same bytes with the same strides on another device."""
    size = cache.untyped_storage().size() // cache.element_size()
    store = cache.as_strided((size,), (1,), 0).to(device)
    return store.as_strided(cache.shape, cache.stride(), cache.storage_offset())


def poison(cache: torch.Tensor, fmt: str, keep: torch.Tensor) -> torch.Tensor:
    """A copy of a cache [pages, page, width] in which every slot that is not in `keep` is NaN codes throughout."""
    store = cache.as_strided((cache.untyped_storage().size() // cache.element_size(),), (1,), 0).clone()
    copy = store.as_strided(cache.shape, cache.stride())
    pages, page = copy.shape[:2]
    kept = set(keep.flatten().tolist())
    for slot in range(pages * page):
        if slot in kept:
            continue
        if fmt != "v4":
            copy[slot // page, slot % page] = math.nan if fmt == "bf16" else NAN_CODE
            continue
        begin = (slot // page) * copy.stride(0)
        offset = slot % page
        store[begin + offset * 576 : begin + (offset + 1) * 576] = NAN_CODE
        store[begin + page * 576 + offset * 8 : begin + page * 576 + offset * 8 + 8] = 255
    return copy


# ---- Attention ----


@dataclass
class Reference:
    """Float64 results, and what tolerances need to know of each row."""

    out: torch.Tensor  # [b, s_q, h_q, 512]
    lse: torch.Tensor  # [b, s_q, h_q]
    value_rms: torch.Tensor  # [b, s_q, h_q]: of the selected values, weighted by their probabilities
    deviation: torch.Tensor  # [b, s_q, h_q]: of the scores
    num_valid: torch.Tensor  # [b, s_q]


def _selected(rows: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None, b: int, s: int) -> torch.Tensor:
    entries = indices[b, s].to(torch.int64)
    if length is not None:
        n = int(length[b] if length.dim() == 1 else length[b, s])
        entries = entries[: min(max(n, 0), len(entries))]
    return rows[entries[(entries >= 0) & (entries < len(rows))]]


def _cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    fmt: str,
    *,
    sm_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> Reference:
    """q [b, s_q, h_q, d_qk], indices [b, s_q, topk]."""
    q, indices, topk_length = q.detach().cpu().double(), indices.cpu(), _cpu(topk_length)
    extra_indices, extra_topk_length = _cpu(extra_indices), _cpu(extra_topk_length)
    b, s_q, h_q, d_qk = q.shape
    scale = float(torch.tensor(d_qk**-0.5 if sm_scale is None else sm_scale, dtype=torch.float32))
    rows = key_rows(cache, fmt)
    extra_rows = None if extra_cache is None else key_rows(extra_cache, fmt)
    shape = (b, s_q, h_q)
    result = Reference(
        torch.zeros(*shape, 512, dtype=torch.float64),
        torch.full(shape, -math.inf, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.float64),
        torch.zeros(shape[:2], dtype=torch.int64),
    )
    for i in range(b):
        for s in range(s_q):
            keys = _selected(rows, indices, topk_length, i, s)
            if extra_rows is not None and extra_indices is not None:
                keys = torch.cat([keys, _selected(extra_rows, extra_indices, extra_topk_length, i, s)])
            result.num_valid[i, s] = len(keys)
            if len(keys) == 0:
                continue
            scores = q[i, s] @ keys.T * scale  # [h_q, n]
            lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse[:, None])
            values = keys[:, :512]
            result.out[i, s], result.lse[i, s] = weights @ values, lse
            result.value_rms[i, s] = (weights @ values.square().mean(-1)).sqrt()
            random_signs = (q[i, s].square() @ keys.square().mean(0)).sqrt() * abs(scale)
            result.deviation[i, s] = torch.maximum(scores.std(-1, correction=0), random_signs)
    if attn_sink is not None:
        factor = torch.sigmoid(result.lse - attn_sink.detach().cpu().double())
        factor = torch.where(torch.isneginf(result.lse), 0.0, factor)
        result.out = result.out * factor[..., None]
        result.value_rms = result.value_rms * factor
    return result


# ---- Comparison ----


def _check_kinds(name: str, value: torch.Tensor, want: torch.Tensor) -> None:
    same = (torch.isfinite(value) & torch.isfinite(want)) | (torch.isnan(value) & torch.isnan(want)) | (value == want)
    assert same.all(), (
        f"{name}: finite, NaN and infinite places differ, first at {(~same).nonzero()[0].tolist()}: "
        f"{value[~same][0].item()}, want {want[~same][0].item()}"
    )


def check_result(out: torch.Tensor, lse: torch.Tensor, want: Reference, device: str) -> None:
    """out [b, s_q, h_q, 512] and lse [b, s_q, h_q] within the bounds that hold for kernels with exact operands."""
    assert out.shape == want.out.shape and out.dtype == torch.bfloat16, (out.shape, out.dtype)
    assert lse.shape == want.lse.shape and lse.dtype == torch.float32, (lse.shape, lse.dtype)
    value, reference = out.detach().cpu().double(), want.out
    _check_kinds("out", value, reference)
    _check_kinds("lse", lse.detach().cpu().double(), want.lse)
    finite = torch.isfinite(reference)
    value, reference = value.where(finite, 0.0), reference.where(finite, 0.0)
    growth = (want.deviation / 6.0).clamp(min=1.0).nan_to_num(1.0)
    row_rms = reference.square().mean(-1).sqrt()
    averaged = want.value_rms / want.num_valid.clamp(min=1).double().sqrt()[..., None]
    size = torch.where(row_rms < averaged / 4, want.value_rms, row_rms).nan_to_num(0.0)
    flushed = 2.0**10 * torch.finfo(torch.float32).tiny

    error = (value - reference).abs()
    allowed = flushed + growth[..., None] * (1e-2 * size[..., None] + 2.0**-8 * reference.abs())
    assert (error <= allowed).all(), f"an element of out is off by {(error / allowed).max().item():.3g} of the allowed"
    rounding = (reference.to(torch.bfloat16).double() - reference).square().mean(-1).sqrt()
    row_allowed = flushed + torch.maximum(2.2e-3 * growth * size, rounding + (2.2e-3 - 1.65e-3) * growth * size)
    row_error = error.square().mean(-1).sqrt()
    worst_row = (row_error / row_allowed).max().item() if row_error.numel() else 0.0
    assert worst_row <= 1, f"a row is off by {worst_row:.3g} of the allowed"

    bound = 2e-5 if device == "cpu" else 5e-4
    held = torch.isfinite(want.lse)
    lse_error = (lse.detach().cpu().double() - want.lse).abs()[held] / want.lse.abs().clamp(min=1.0)[held]
    assert (lse_error <= bound * growth[held]).all(), f"lse is off by {lse_error.max().item():.3g}"


# ---- Inputs ----


@dataclass
class Inputs:
    """One decode problem on a device, and the cache's bytes on the CPU for the reference."""

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    fmt: str

    @property
    def num_slots(self) -> int:
        return self.cache.shape[0] * self.cache.shape[1]


def make_cache(
    fmt: str, pages: int, page: int, seed: int = 0, scale_mode: str = "pow2", extra_page_bytes: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(pages, page, KEY_DIM[fmt], generator=generator)
    # Tiles and tokens of different sizes, so that no two scales need be equal.
    kv *= torch.exp(0.7 * torch.randn(pages, page, 1, generator=generator))
    kv[..., :128] *= 3.0
    return quantize(kv.bfloat16(), fmt, scale_mode, extra_page_bytes)


def make_inputs(
    fmt: str,
    device: str,
    *,
    b: int = 2,
    s_q: int = 1,
    h_q: int = 16,
    topk: int = 64,
    pages: int = 4,
    page: int = 64,
    seed: int = 0,
    scale_mode: str = "pow2",
    extra_page_bytes: int = 0,
) -> Inputs:
    """Random queries, cache and valid indices (with repetitions)."""
    generator = torch.Generator().manual_seed(seed + 1)
    cache = make_cache(fmt, pages, page, seed, scale_mode, extra_page_bytes)
    q = torch.randn(b, s_q, h_q, KEY_DIM[fmt], generator=generator).bfloat16()
    indices = torch.randint(0, pages * page, (b, s_q, topk), generator=generator, dtype=torch.int32)
    return Inputs(q.to(device), move_cache(cache, device), indices.to(device), fmt)
