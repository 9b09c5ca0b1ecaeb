"""What the Python tests hold results against: caches made byte by byte, float64 attention over the stored bytes, and
the comparison by the tolerances of docs/numerics.md. Plain PyTorch; nothing here calls the library."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Where the bytes of a token are: `codes` e4m3 numbers first, `bf16` numbers from rope_at on, scales from scales_at
    on. A format with `group` bytes keeps its scales in that many a token behind the page's rows instead."""

    codes: int
    bf16: int
    row: int  # bytes of a row
    scale: str  # "float32", "ue8m0", "cache" (one for all) or "none"
    scales: int = 0  # of a token
    scales_at: int = 0
    rope_at: int = 0
    group: int = 0
    multiple: int = 16  # to which writers round a page's bytes up

    @property
    def key_dim(self) -> int:
        return self.codes + self.bf16


LAYOUTS = {
    "v32": Layout(512, 64, 656, "float32", 4, scales_at=512, rope_at=528),
    "v4": Layout(448, 64, 576, "ue8m0", 7, rope_at=448, group=8, multiple=576),
    "bf16": Layout(0, 576, 1152, "none"),
    "v41": Layout(512, 0, 528, "ue8m0", 16, scales_at=512, multiple=528),
    "v41plane": Layout(512, 0, 512, "ue8m0", 16, group=16, multiple=512),
    "v32nope": Layout(512, 0, 656, "float32", 4, scales_at=512),
    "v32nope_compact": Layout(512, 0, 528, "float32", 4, scales_at=512),
    "fp8": Layout(576, 0, 576, "cache"),
    "fp8nope": Layout(512, 0, 512, "cache"),
    "bf16nope": Layout(0, 512, 1024, "none"),
}
FORMATS = list(LAYOUTS)
# Formats that each kind of device has a decode kernel for. Tests of the others expect NotImplementedError.
DECODE_FORMATS = {"cpu": FORMATS, "cuda": FORMATS}
# Those that the dtype and width of a cache tell. The others have to be named.
INFERRED = ("v32", "v4", "bf16", "bf16nope")
SECOND_CACHE = ("v4", "v41", "v41plane")
HAS_ROPE = ("v32", "v4", "bf16", "v41", "v41plane", "fp8")
AMAX = ("v32", "v32nope", "v32nope_compact")  # formats whose scales need not be powers of two

KEY_DIM = {fmt: layout.key_dim for fmt, layout in LAYOUTS.items()}
# The last extent of a cache: bytes, or bf16 numbers.
WIDTH = {fmt: layout.row + layout.group if layout.codes else layout.bf16 for fmt, layout in LAYOUTS.items()}
KV_SCALE = 0.037  # of fp8 caches in tests; no power of two, so that leaving it out or rounding it shows
NAN_CODE = 0x7F


def kv_scale_of(fmt: str) -> float | None:
    """What a call over a cache of make_cache() has to pass."""
    return KV_SCALE if LAYOUTS[fmt].scale == "cache" else None


# ---- Caches ----


def page_bytes(fmt: str, page: int) -> int:
    """What writers give a page."""
    layout = LAYOUTS[fmt]
    return -(-page * (layout.row + layout.group) // layout.multiple) * layout.multiple


def to_codes(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def quantize_tile(values: torch.Tensor, scale_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """values [..., n] float32 -> (e4m3 codes [..., n] uint8, scale [...] float32), for finite values."""
    amax = values.abs().amax(-1)
    if scale_mode == "pow2":
        # frexp: amax / 448 = m * 2^e with 0.5 <= m < 1, so that the next power of two is 2^e, or 2^(e-1) if m is 0.5.
        mantissa, exponent = torch.frexp(torch.clamp(amax.double() / 448, min=1e-4))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).float()
    else:
        scale = torch.where(amax > 0, amax / 448, torch.finfo(torch.float32).tiny)
    codes = to_codes(values / scale[..., None])
    zero = (amax == 0)[..., None]
    return torch.where(zero, torch.zeros_like(codes), codes), scale


def new_cache(fmt: str, pages: int, page: int, extra_page_bytes: int = 0) -> torch.Tensor:
    """A cache of NaN codes throughout, its page stride larger than writers' by extra_page_bytes."""
    stride = page_bytes(fmt, page) + extra_page_bytes
    store = torch.full((pages * stride,), NAN_CODE, dtype=torch.uint8)
    if LAYOUTS[fmt].codes:
        return store.as_strided((pages, page, WIDTH[fmt]), (stride, WIDTH[fmt], 1))
    numbers = store.view(torch.bfloat16).fill_(math.nan)
    return numbers.as_strided((pages, page, WIDTH[fmt]), (stride // 2, WIDTH[fmt], 1))


def page_parts(cache: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a cache's bytes: rows [pages, page, row] and, where scales lie behind them, [pages, page, group]."""
    layout, (pages, page) = LAYOUTS[fmt], cache.shape[:2]
    stride = cache.stride(0)
    rows = cache.as_strided((pages, page, layout.row), (stride, layout.row, 1))
    begin = cache.storage_offset() + page * layout.row
    return rows, cache.as_strided((pages, page, layout.group), (stride, layout.group, 1), begin)


def quantize(
    kv: torch.Tensor,
    fmt: str,
    scale_mode: str = "pow2",
    extra_page_bytes: int = 0,
    kv_scale: float | None = KV_SCALE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """kv bf16 [pages, page, d_qk] -> cache of the given format, a new one unless `out` is to be written. What no number
    is stored in, gaps and reserved bytes, is left as it is (NaN codes in a new one), but for v4's padding, which is
    0."""
    layout, (pages, page, _) = LAYOUTS[fmt], kv.shape
    cache = new_cache(fmt, pages, page, extra_page_bytes) if out is None else out
    if layout.codes == 0:
        cache.copy_(kv)
        return cache
    rows, groups = page_parts(cache, fmt)
    latent = kv[..., : layout.codes].float()
    if layout.scale == "cache":
        rows[..., : layout.codes] = to_codes(latent / torch.tensor(1.0 if kv_scale is None else kv_scale))
        return cache
    codes, scales = quantize_tile(latent.view(pages, page, layout.scales, -1), scale_mode)
    rows[..., : layout.codes] = codes.view(pages, page, -1)
    if layout.bf16:
        rows[..., layout.rope_at : layout.rope_at + 2 * layout.bf16] = (
            kv[..., layout.codes :].contiguous().view(torch.uint8)
        )
    if layout.scale == "float32":
        stored = scales.contiguous().view(torch.uint8).view(pages, page, -1)
    else:
        stored = (torch.frexp(scales)[1].to(torch.int32) - 1 + 127).to(torch.uint8)
    if layout.group:
        groups[:] = 0
        groups[..., : layout.scales] = stored
    else:
        rows[..., layout.scales_at : layout.scales_at + stored.shape[-1]] = stored
    return cache


def key_rows(cache: torch.Tensor, fmt: str, kv_scale: float | None = KV_SCALE) -> torch.Tensor:
    """The stored numbers of every slot, exactly: float64 [pages * page, d_qk]."""
    cache = cache.cpu()
    if cache.dim() == 4:
        cache = cache[:, :, 0]
    layout, num_slots = LAYOUTS[fmt], cache.shape[0] * cache.shape[1]
    if layout.codes == 0:
        return cache.double().reshape(num_slots, -1)
    rows, groups = page_parts(cache if cache.dtype == torch.uint8 else cache.view(torch.uint8), fmt)
    rows = rows.reshape(num_slots, layout.row)
    values = rows[:, : layout.codes].contiguous().view(torch.float8_e4m3fn).float().double()
    if layout.scale == "cache":
        return values * float(torch.tensor(1.0 if kv_scale is None else kv_scale, dtype=torch.float32))
    if layout.group:
        stored = groups.reshape(num_slots, layout.group)[:, : layout.scales]
    else:
        size = 4 if layout.scale == "float32" else 1
        stored = rows[:, layout.scales_at : layout.scales_at + size * layout.scales]
    if layout.scale == "float32":
        scales = stored.contiguous().view(torch.float32).double()
    else:
        scales = torch.where(stored == 255, math.nan, torch.exp2(stored.double() - 127))
    values = (values.view(num_slots, layout.scales, -1) * scales[..., None]).flatten(1)
    rope = rows[:, layout.rope_at : layout.rope_at + 2 * layout.bf16]
    return torch.cat([values, rope.contiguous().view(torch.bfloat16).double()], 1) if layout.bf16 else values


def move_cache(cache: torch.Tensor, device: str) -> torch.Tensor:
    """The same bytes with the same strides on another device."""
    size = cache.untyped_storage().size() // cache.element_size()
    store = cache.as_strided((size,), (1,), 0).to(device)
    return store.as_strided(cache.shape, cache.stride(), cache.storage_offset())


def poison(cache: torch.Tensor, fmt: str, keep: torch.Tensor) -> torch.Tensor:
    """A copy of a cache [pages, page, width] in which every slot that is not in `keep` is NaN throughout."""
    store = cache.as_strided((cache.untyped_storage().size() // cache.element_size(),), (1,), 0).clone()
    copy = store.as_strided(cache.shape, cache.stride())
    pages, page = copy.shape[:2]
    gone = torch.ones(pages * page, dtype=torch.bool)
    gone[keep.flatten().long()] = False
    gone = gone.view(pages, page)
    if LAYOUTS[fmt].codes == 0:
        copy[gone] = math.nan
        return copy
    rows, groups = page_parts(copy, fmt)
    rows[gone] = NAN_CODE
    groups[gone] = 255
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
    fmt: str = ""


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
    kv_scale: float | None = KV_SCALE,
    sm_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> Reference:
    """q [b, s_q, h_q, d_qk], indices [b, s_q, topk]. kv_scale is that of the fp8 formats."""
    q, indices, topk_length = q.detach().cpu().double(), indices.cpu(), _cpu(topk_length)
    extra_indices, extra_topk_length = _cpu(extra_indices), _cpu(extra_topk_length)
    b, s_q, h_q, d_qk = q.shape
    scale = float(torch.tensor(d_qk**-0.5 if sm_scale is None else sm_scale, dtype=torch.float32))
    rows = key_rows(cache, fmt, kv_scale)
    extra_rows = None if extra_cache is None else key_rows(extra_cache, fmt)
    shape = (b, s_q, h_q)
    result = Reference(
        torch.zeros(*shape, 512, dtype=torch.float64),
        torch.full(shape, -math.inf, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.float64),
        torch.zeros(shape[:2], dtype=torch.int64),
        fmt,
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
    """out [b, s_q, h_q, 512] and lse [b, s_q, h_q] within the bounds for kernels with exact operands, or, for bf16 caches
    on a GPU, with rounded probabilities."""
    is_rounded = device != "cpu" and want.fmt in ("bf16", "bf16nope")
    of_element, of_row = (2e-2, 4e-3) if is_rounded else (1e-2, 2.2e-3)
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
    allowed = flushed + growth[..., None] * (of_element * size[..., None] + 2.0**-8 * reference.abs())
    assert (error <= allowed).all(), f"an element of out is off by {(error / allowed).max().item():.3g} of the allowed"
    rounding = (reference.to(torch.bfloat16).double() - reference).square().mean(-1).sqrt()
    row_allowed = flushed + torch.maximum(of_row * growth * size, rounding + (of_row - 1.65e-3) * growth * size)
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
    def options(self) -> dict[str, object]:
        """What decode() and the cache operations have to be told of the cache: its format, unless its width does, and
        its scale."""
        return cache_options(self.fmt)

    @property
    def num_slots(self) -> int:
        return self.cache.shape[0] * self.cache.shape[1]


def cache_options(fmt: str) -> dict[str, object]:
    options: dict[str, object] = {} if fmt in INFERRED else {"format": fmt}
    return options if kv_scale_of(fmt) is None else options | {"kv_scale": kv_scale_of(fmt)}


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
