"""Writing caches and reading them back."""

from __future__ import annotations

import sys
from typing import Any

from . import _frameworks, _native
from ._adapters import Framework
from ._arguments import goes_through_ops, refuse_gradients, scale_number
from ._formats import CACHE_DTYPES, KEY_DIMS, WIDTHS, format_number, infer_format

if sys.modules.get("torch") is not None:
    from . import _torch_cache_ops


def _shape(name: str, tensor: Any) -> tuple[int, ...]:
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise TypeError(_frameworks.not_a_tensor(name, tensor))
    return tuple(shape)


def _float_dtype(dtype: Any, default: str) -> str:
    """"bfloat16" or "float32", from a framework's dtype or a str."""
    if dtype is None:
        return default
    name = getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.")
    if name not in ("bfloat16", "float32"):
        raise TypeError(f"dtype is {dtype}; allowed are bfloat16 and float32")
    return name


def quantize(
    kv: Any, *, format: str = "v32", scale: str = "pow2", kv_scale: float | None = None, out: Any = None
) -> Any:
    """Quantises rows to a new cache, row i of page p to slot p * page + i.

    Rounds to nearest even and saturates at 448. A tile of zeros gets codes 0 and a finite positive scale. NaN and
    infinity become the NaN code and stay within their tile.

    Args:
        kv: bfloat16 [num_pages, page, d_qk], RoPE last.
        format: one of those of decode(); into bf16 and bf16nope the rows are copied.
        scale: "pow2", 2 ** ceil(log2(max(amax / 448, 1e-4))), or "amax", amax / 448 (v32, v32nope and v32nope_compact
            only); without effect where tiles have no scales.
        kv_scale: fp8 and fp8nope: codes are e4m3(value / kv_scale); None: 1.
        out: [num_pages, page, width] to write to; None: a new one, its pages padded as writers of v4 and v41plane do.

    Returns:
        The cache, uint8 [num_pages, page, width], or bfloat16 for bf16 and bf16nope.

    >>> kv_cache = chiasma.quantize(kv)
    """
    number, scale_mode = format_number(format), scale_number(scale)
    if number not in WIDTHS:
        raise ValueError("format is None; what kv is quantised to must be named")
    if goes_through_ops(kv, out):
        return _torch_cache_ops.quantize(kv, format, scale, kv_scale, out)
    framework = _frameworks.of("kv", kv)
    refuse_gradients((("kv", kv), ("out", out)))
    shape = _shape("kv", kv)
    if len(shape) != 3 or shape[2] != KEY_DIMS[number]:
        raise ValueError(f"kv has shape {list(shape)}; it must be [num_pages, page, {KEY_DIMS[number]}] for {format}")
    _frameworks.check_usable("kv", kv)
    rows = framework.export(framework.reshape(kv, (shape[0] * shape[1], shape[2])))
    cache = _frameworks.export("out", out, written=True)
    if cache is None:
        cache = _new_cache(framework, number, shape[0], shape[1], kv)
    names = ("kv", "k_pe", "slot_mapping", "out", "nonfinite_count", "skipped_count")
    stream = framework.stream(kv)
    _native.call(_native.quantize, names, rows, None, None, cache, None, None, number, kv_scale, scale_mode, stream)
    framework.finish(kv)
    return framework.result(cache, CACHE_DTYPES[number], kv) if out is None else out


def _new_cache(framework: Framework, number: int, pages: int, page: int, like: Any) -> Any:
    width, dtype = WIDTHS[number], CACHE_DTYPES[number]
    stride = _native.page_bytes(number, page) // (1 if dtype == "uint8" else 2)
    if stride == page * width or pages * page == 0:
        return framework.empty((pages, page, width), dtype, like)
    memory = framework.empty((pages * stride,), dtype, like)
    return framework.strided(memory, (pages, page, width), (stride, width, 1))


def dequantize(
    kv_cache: Any,
    *,
    format: str | None = None,
    kv_scale: float | None = None,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """The numbers of every slot of a cache.

    Args:
        kv_cache, format, kv_scale: as decode() takes them.
        dtype: float32 (exact) or bfloat16 (rounded to nearest even), as the framework's dtype or its name; None:
            float32.
        out: [num_pages, page, d_qk] of either dtype to write to; None: a new one.

    Returns:
        [num_pages, page, d_qk], RoPE last.

    >>> kv = chiasma.dequantize(kv_cache)
    """
    number = infer_format("kv_cache", kv_cache, format)
    result_dtype = _float_dtype(dtype, "float32")
    if goes_through_ops(kv_cache, out):
        return _torch_cache_ops.dequantize(kv_cache, number, kv_scale, result_dtype, out)
    framework = _frameworks.of("kv_cache", kv_cache)
    refuse_gradients((("kv_cache", kv_cache), ("out", out)))
    kv = _frameworks.export("out", out, written=True)
    if kv is None:
        kv = framework.empty((*_shape("kv_cache", kv_cache)[:2], KEY_DIMS[number]), result_dtype, kv_cache)
    cache = _frameworks.export("kv_cache", kv_cache)
    stream = framework.stream(kv_cache)
    _native.call(_native.dequantize, ("kv_cache", "out"), cache, kv, number, kv_scale, stream)
    framework.finish(kv_cache)
    return framework.result(kv, result_dtype, kv_cache) if out is None else out


def quantize_and_append(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    *,
    format: str | None = None,
    scale: str = "pow2",
    kv_scale: float | None = None,
    nonfinite_count: Any = None,
    skipped_count: Any = None,
) -> None:
    """Quantises new tokens and writes each into its slot of a cache, in place.

    Args:
        kv_c: bfloat16 [T, d_qk - 64], the columns in front of the rotary ones; any strides, the last dimension
            contiguous.
        k_pe: bfloat16 [T, 64], strides of its own; None: kv_c has all columns, [T, d_qk], as formats without rotary
            columns have it.
        kv_cache, format, kv_scale: as decode() takes them.
        slot_mapping: int64 [T]; a slot outside the cache, -1 included, skips the token. On a GPU two tokens with one
            slot leave undefined bytes in it; on the CPU the later one wins.
        scale: as in quantize().
        nonfinite_count: int64 [1] that receives the number of NaN and infinite inputs among the tokens stored.
        skipped_count: int64 [1] that receives the number of tokens whose slot is neither in the cache nor -1, which is
            how callers skip a token on purpose: a number above 0 says that slot_mapping is wrong.

    >>> chiasma.quantize_and_append(kv_c, k_pe, kv_cache, slot_mapping)
    """
    number, scale_mode = infer_format("kv_cache", kv_cache, format), scale_number(scale)
    counts = (nonfinite_count, skipped_count)
    if goes_through_ops(kv_c, k_pe, kv_cache, slot_mapping, *counts):
        return _torch_cache_ops.quantize_and_append(
            kv_c, k_pe, kv_cache, slot_mapping, number, scale, kv_scale, *counts
        )
    framework = _frameworks.of("kv_c", kv_c)
    written = ("kv_cache", "nonfinite_count", "skipped_count")
    names = ("kv_c" if k_pe is not None else "kv", "k_pe", "slot_mapping", *written)
    tensors = (kv_c, k_pe, slot_mapping, kv_cache, *counts)
    refuse_gradients(zip(names, tensors))
    for name, tensor in zip(names[:4], tensors):
        if tensor is None and name != "k_pe":
            raise TypeError(_frameworks.not_a_tensor(name, None))
    exported = [
        _frameworks.export(name, tensor, written=name in written)
        for name, tensor in zip(names, tensors)
    ]
    _native.call(_native.quantize, names, *exported, number, kv_scale, scale_mode, framework.stream(kv_c))
    framework.finish(kv_c)
    return None


def gather_dequantize(
    kv_cache: Any,
    slots: Any = None,
    *,
    block_table: Any = None,
    seq_lens: Any = None,
    starts: Any = None,
    out: Any = None,
    rows: int | None = None,
    dtype: Any = None,
    format: str | None = None,
    kv_scale: float | None = None,
) -> Any:
    """Some rows of a cache as numbers, as prefill over a quantised cache needs them. Either slots says which, or
    block_table, seq_lens and starts together do: token t of request i, 0 <= t < seq_lens[i], goes to row starts[i] + t.
    A slot or page outside the cache, -1 included, gives a row of zeros.

    Args:
        kv_cache, format, kv_scale: as decode() takes them.
        slots: int32 or int64 [rows].
        block_table: int32 [b, max_pages].
        seq_lens: int32 [b].
        starts: int32 or int64 [b].
        out: bfloat16 or float32 [rows, d_qk] to write to; None: a new one. Rows that no token goes to are left as they
            are, and are zeros in a new one.
        rows: rows of a new out; needed with block_table, otherwise told by slots.
        dtype: of a new out; None: bfloat16.

    Returns:
        [rows, d_qk], RoPE last.

    >>> kv = chiasma.gather_dequantize(kv_cache, slots)
    """
    number = infer_format("kv_cache", kv_cache, format)
    result_dtype = _float_dtype(dtype, "bfloat16")
    if slots is None and block_table is None:
        raise ValueError("slots and block_table are None; one of them is required")
    if out is None and slots is None and rows is None:
        raise ValueError("rows is None; with block_table and without out it must say how many rows the result has")
    if goes_through_ops(kv_cache, slots, block_table, seq_lens, starts, out):
        return _torch_cache_ops.gather_dequantize(
            kv_cache, slots, block_table, seq_lens, starts, out, rows, result_dtype, number, kv_scale
        )
    framework = _frameworks.of("kv_cache", kv_cache)
    names = ("kv_cache", "slots", "block_table", "seq_lens", "starts", "out")
    tensors = (kv_cache, slots, block_table, seq_lens, starts, out)
    refuse_gradients(zip(names, tensors))
    exported = [_frameworks.export(name, tensor, written=name == "out") for name, tensor in zip(names, tensors)]
    if out is None:
        num_rows = rows if rows is not None else _shape("slots", slots)[0]
        exported[5] = framework.empty((num_rows, KEY_DIMS[number]), result_dtype, kv_cache)
        if slots is None:
            exported[5] = framework.zeroed(exported[5])
    _native.call(_native.gather_dequantize, names, *exported, number, kv_scale, framework.stream(kv_cache))
    framework.finish(kv_cache)
    return framework.result(exported[5], result_dtype, kv_cache) if out is None else out


def translate_indices(
    indices: Any,
    block_table: Any,
    *,
    page: int,
    request: Any = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    out: Any = None,
) -> Any:
    """From tokens of a request, as an indexer selects them, to slots of the cache, as decode() takes them:
    slot = block_table[r, t // page] * page + t % page. What has no slot becomes -1.

    With context parallelism, tokens are dealt out to cp_world ranks in runs of cp_interleave; those of other ranks
    become -1, the others are numbered as this rank's cache and block table do.

    Args:
        indices: int32 or int64 [T, topk] or [b, s_q, topk].
        block_table: int32 [requests, max_pages]; None: indices are slots already and are only narrowed to int32.
        page: tokens of a cache page.
        request: int32 [T] ([b]): the row of block_table for each; None: row i for i.
        out: int32 of indices' shape to write to, which may be indices itself; None: a new one.

    Returns:
        int32 slots of indices' shape.

    >>> slots = chiasma.translate_indices(tokens, block_table, page=64)
    """
    if goes_through_ops(indices, block_table, request, out):
        return _torch_cache_ops.translate_indices(
            indices, block_table, page, request, cp_world, cp_rank, cp_interleave, out
        )
    framework = _frameworks.of("indices", indices)
    names = ("indices", "block_table", "request", "out")
    exported = [
        _frameworks.export(name, tensor, written=name == "out")
        for name, tensor in zip(names, (indices, block_table, request, out))
    ]
    if out is None:
        exported[3] = framework.empty(_shape("indices", indices), "int32", indices)
    numbers = (page, cp_world, cp_rank, cp_interleave)
    _native.call(_native.translate_indices, names, *exported, *numbers, framework.stream(indices))
    framework.finish(indices)
    return framework.result(exported[3], "int32", indices) if out is None else out
