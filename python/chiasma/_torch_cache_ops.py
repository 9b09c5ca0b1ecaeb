"""The cache operations as PyTorch operators, in the way of _torch_ops.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ._formats import CACHE_DTYPES, KEY_DIMS, NAMES, PAGE_MULTIPLES, WIDTHS, format_number, infer_format

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "uint8": torch.uint8}


@custom_op("chiasma::quantize_out", mutates_args=("out",))
def _quantize_out(
    kv: Tensor, out: Tensor, format: str = "v32", scale: str = "pow2", kv_scale: float | None = None
) -> None:
    from . import _cache_ops as plain

    plain.quantize(kv, format=format, scale=scale, kv_scale=kv_scale, out=out)


@_quantize_out.register_fake
def _(kv: Tensor, out: Tensor, format: str = "v32", scale: str = "pow2", kv_scale: float | None = None) -> None:
    return None


@custom_op("chiasma::quantize", mutates_args=())
def _quantize(kv: Tensor, format: str = "v32", scale: str = "pow2", kv_scale: float | None = None) -> Tensor:
    from . import _cache_ops as plain

    cache: Tensor = plain.quantize(kv, format=format, scale=scale, kv_scale=kv_scale)
    return cache


@_quantize.register_fake
def _(kv: Tensor, format: str = "v32", scale: str = "pow2", kv_scale: float | None = None) -> Tensor:
    number = format_number(format)
    width, multiple = WIDTHS[number], PAGE_MULTIPLES.get(number, 1)
    pages, page = kv.shape[0], kv.shape[1]
    stride = (page * width + multiple - 1) // multiple * multiple
    dtype = _DTYPES[CACHE_DTYPES[number]]
    return torch.empty_strided((pages, page, width), (stride, width, 1), dtype=dtype, device=kv.device)


def quantize(kv: Any, format: str, scale: str, kv_scale: float | None, out: Any) -> Any:
    """chiasma.quantize() through the operators."""
    if out is None:
        return torch.ops.chiasma.quantize(kv, format, scale, kv_scale)
    torch.ops.chiasma.quantize_out(kv, out, format, scale, kv_scale)
    return out


@custom_op("chiasma::dequantize_out", mutates_args=("out",))
def _dequantize_out(kv_cache: Tensor, out: Tensor, format: str | None = None, kv_scale: float | None = None) -> None:
    from . import _cache_ops as plain

    plain.dequantize(kv_cache, format=format, kv_scale=kv_scale, out=out)


@_dequantize_out.register_fake
def _(kv_cache: Tensor, out: Tensor, format: str | None = None, kv_scale: float | None = None) -> None:
    return None


@custom_op("chiasma::dequantize", mutates_args=())
def _dequantize(
    kv_cache: Tensor, format: str | None = None, dtype: str = "float32", kv_scale: float | None = None
) -> Tensor:
    from . import _cache_ops as plain

    kv: Tensor = plain.dequantize(kv_cache, format=format, kv_scale=kv_scale, dtype=dtype)
    return kv


@_dequantize.register_fake
def _(kv_cache: Tensor, format: str | None = None, dtype: str = "float32", kv_scale: float | None = None) -> Tensor:
    width = KEY_DIMS[infer_format("kv_cache", kv_cache, format)]
    return kv_cache.new_empty((kv_cache.shape[0], kv_cache.shape[1], width), dtype=_DTYPES[dtype])


def dequantize(kv_cache: Any, number: int, kv_scale: float | None, dtype: str, out: Any) -> Any:
    """chiasma.dequantize() through the operators."""
    if out is None:
        return torch.ops.chiasma.dequantize(kv_cache, NAMES[number], dtype, kv_scale)
    torch.ops.chiasma.dequantize_out(kv_cache, out, NAMES[number], kv_scale)
    return out


@custom_op("chiasma::quantize_and_append", mutates_args=("kv_cache", "nonfinite_count", "skipped_count"))
def _quantize_and_append(
    kv_c: Tensor,
    k_pe: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    format: str | None,
    scale: str,
    nonfinite_count: Tensor | None,
    skipped_count: Tensor | None,
    kv_scale: float | None = None,
) -> None:
    from . import _cache_ops as plain

    plain.quantize_and_append(
        kv_c, k_pe, kv_cache, slot_mapping, format=format, scale=scale, kv_scale=kv_scale,
        nonfinite_count=nonfinite_count, skipped_count=skipped_count,
    )  # fmt: skip


@_quantize_and_append.register_fake
def _(*arguments: Any, **options: Any) -> None:
    return None


def quantize_and_append(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    number: int,
    scale: str,
    kv_scale: float | None,
    nonfinite_count: Any,
    skipped_count: Any,
) -> None:
    """chiasma.quantize_and_append() through the operator."""
    torch.ops.chiasma.quantize_and_append(
        kv_c, k_pe, kv_cache, slot_mapping, NAMES[number], scale, nonfinite_count, skipped_count, kv_scale
    )


@custom_op("chiasma::gather_dequantize_out", mutates_args=("out",))
def _gather_dequantize_out(
    kv_cache: Tensor,
    slots: Tensor | None,
    block_table: Tensor | None,
    seq_lens: Tensor | None,
    starts: Tensor | None,
    out: Tensor,
    format: str | None = None,
    kv_scale: float | None = None,
) -> None:
    from . import _cache_ops as plain

    plain.gather_dequantize(
        kv_cache, slots, block_table=block_table, seq_lens=seq_lens, starts=starts, out=out, format=format,
        kv_scale=kv_scale,
    )  # fmt: skip


@_gather_dequantize_out.register_fake
def _(*arguments: Any, **options: Any) -> None:
    return None


@custom_op("chiasma::gather_dequantize", mutates_args=())
def _gather_dequantize(
    kv_cache: Tensor,
    slots: Tensor | None = None,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    starts: Tensor | None = None,
    rows: int | None = None,
    dtype: str = "bfloat16",
    format: str | None = None,
    kv_scale: float | None = None,
) -> Tensor:
    from . import _cache_ops as plain

    kv: Tensor = plain.gather_dequantize(
        kv_cache, slots, block_table=block_table, seq_lens=seq_lens, starts=starts, rows=rows, dtype=dtype,
        format=format, kv_scale=kv_scale,
    )  # fmt: skip
    return kv


@_gather_dequantize.register_fake
def _(
    kv_cache: Tensor,
    slots: Tensor | None = None,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    starts: Tensor | None = None,
    rows: int | None = None,
    dtype: str = "bfloat16",
    format: str | None = None,
    kv_scale: float | None = None,
) -> Tensor:
    if rows is None:
        assert slots is not None
        rows = slots.shape[0]
    width = KEY_DIMS[infer_format("kv_cache", kv_cache, format)]
    return kv_cache.new_empty((rows, width), dtype=_DTYPES[dtype])


def gather_dequantize(
    kv_cache: Any,
    slots: Any,
    block_table: Any,
    seq_lens: Any,
    starts: Any,
    out: Any,
    rows: int | None,
    dtype: str,
    number: int,
    kv_scale: float | None,
) -> Any:
    """chiasma.gather_dequantize() through the operators."""
    where = (slots, block_table, seq_lens, starts)
    if out is None:
        return torch.ops.chiasma.gather_dequantize(kv_cache, *where, rows, dtype, NAMES[number], kv_scale)
    torch.ops.chiasma.gather_dequantize_out(kv_cache, *where, out, NAMES[number], kv_scale)
    return out


@custom_op("chiasma::translate_indices_out", mutates_args=("out",))
def _translate_indices_out(
    indices: Tensor,
    block_table: Tensor | None,
    request: Tensor | None,
    out: Tensor,
    page: int,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> None:
    from . import _cache_ops as plain

    plain.translate_indices(
        indices, block_table, page=page, request=request, cp_world=cp_world, cp_rank=cp_rank,
        cp_interleave=cp_interleave, out=out,
    )  # fmt: skip


@_translate_indices_out.register_fake
def _(*arguments: Any, **options: Any) -> None:
    return None


@custom_op("chiasma::translate_indices", mutates_args=())
def _translate_indices(
    indices: Tensor,
    block_table: Tensor | None,
    request: Tensor | None,
    page: int,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> Tensor:
    from . import _cache_ops as plain

    slots: Tensor = plain.translate_indices(
        indices, block_table, page=page, request=request, cp_world=cp_world, cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )  # fmt: skip
    return slots


@_translate_indices.register_fake
def _(indices: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return indices.new_empty(indices.shape, dtype=torch.int32)


def translate_indices(
    indices: Any,
    block_table: Any,
    page: int,
    request: Any,
    cp_world: int,
    cp_rank: int,
    cp_interleave: int,
    out: Any,
) -> Any:
    """chiasma.translate_indices() through the operators."""
    numbers = (page, cp_world, cp_rank, cp_interleave)
    if out is None:
        return torch.ops.chiasma.translate_indices(indices, block_table, request, *numbers)
    torch.ops.chiasma.translate_indices_out(indices, block_table, request, out, *numbers)
    return out
