"""The calls as PyTorch operators, torch.ops.chiasma.*, with fake implementations: what torch.compile traces. Outside of
it the plain functions are faster, and these lead to them.

Each operator has the name of the function that it stands for; with "_out" it writes to the caller's tensors. What an
operator writes to has no default: PyTorch before 2.13 fails where such an argument is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ._arguments import refuse_gradients
from ._formats import infer_format

_VALUE_DIM = 512


def _query(q: Tensor, q_pe: Tensor | None) -> Any:
    return q if q_pe is None else (q, q_pe)


def _new_results(q: Tensor) -> tuple[Tensor, Tensor]:
    lead = q.shape[:-1]
    return q.new_empty((*lead, _VALUE_DIM)), q.new_empty(lead, dtype=torch.float32)


# ---- Decode ----
# kernel_name: Inductor has a parameter called kernel of its own, which an operator's would collide with.


@custom_op("chiasma::decode_out", mutates_args=("out", "lse", "workspace"))
def _decode_out(
    q: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    extra_kv_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_topk_length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    workspace: Tensor | None,
    format: str | None = None,
    sm_scale: float | None = None,
    kernel_name: str | None = None,
    batch_invariant: bool = False,
    kv_scale: float | None = None,
) -> None:
    from . import _decode as plain

    plain.decode(
        _query(q, q_pe), kv_cache, indices, format=format, sm_scale=sm_scale, topk_length=topk_length,
        attn_sink=attn_sink, extra_kv_cache=extra_kv_cache, extra_indices=extra_indices,
        extra_topk_length=extra_topk_length, out=out, lse=lse, workspace=workspace, kernel=kernel_name,
        batch_invariant=batch_invariant, kv_scale=kv_scale,
    )  # fmt: skip


@_decode_out.register_fake
def _(*arguments: Any, **options: Any) -> None:
    return None


@custom_op("chiasma::decode", mutates_args=())
def _decode(
    q: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    format: str | None = None,
    sm_scale: float | None = None,
    kernel_name: str | None = None,
    batch_invariant: bool = False,
    kv_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    from . import _decode as plain

    return plain.decode(
        _query(q, q_pe), kv_cache, indices, format=format, sm_scale=sm_scale, topk_length=topk_length,
        attn_sink=attn_sink, extra_kv_cache=extra_kv_cache, extra_indices=extra_indices,
        extra_topk_length=extra_topk_length, kernel=kernel_name, batch_invariant=batch_invariant,
        kv_scale=kv_scale,
    )  # fmt: skip


@_decode.register_fake
def _(q: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _new_results(q)


def decode(
    q: Any,
    kv_cache: Any,
    indices: Any,
    format: str | None,
    kv_scale: float | None,
    sm_scale: float | None,
    topk_length: Any,
    attn_sink: Any,
    extra_kv_cache: Any,
    extra_indices: Any,
    extra_topk_length: Any,
    out: Any,
    lse: Any,
    workspace: Any,
    kernel: str | None,
    batch_invariant: bool,
) -> tuple[Any, Any]:
    """chiasma.decode() through the operators."""
    q, q_pe = q if isinstance(q, (tuple, list)) else (q, None)
    inputs = (q, q_pe, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length)
    refuse_gradients([("a tensor", tensor) for tensor in inputs])
    infer_format("kv_cache", kv_cache, format)
    if out is None and lse is None and workspace is None:
        options = (format, sm_scale, kernel, batch_invariant, kv_scale)
        result: tuple[Any, Any] = torch.ops.chiasma.decode(*inputs, *options)
        return result
    if out is None or lse is None:
        new_out, new_lse = _new_results(q)
        out, lse = new_out if out is None else out, new_lse if lse is None else lse
    torch.ops.chiasma.decode_out(*inputs, out, lse, workspace, format, sm_scale, kernel, batch_invariant, kv_scale)
    return out, lse


# ---- Merge ----


@custom_op("chiasma::merge_out", mutates_args=("out", "lse"))
def _merge_out(
    part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, plus_infinity_is_empty: bool = False
) -> None:
    from . import _decode as plain

    plain.merge(part_out, part_lse, out=out, lse=lse, plus_infinity_is_empty=plus_infinity_is_empty)


@_merge_out.register_fake
def _(*arguments: Any, **options: Any) -> None:
    return None


@custom_op("chiasma::merge", mutates_args=())
def _merge(part_out: Tensor, part_lse: Tensor, plus_infinity_is_empty: bool = False) -> tuple[Tensor, Tensor]:
    from . import _decode as plain

    return plain.merge(part_out, part_lse, plus_infinity_is_empty=plus_infinity_is_empty)


@_merge.register_fake
def _(part_out: Tensor, part_lse: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return part_out.new_empty(part_out.shape[1:]), part_lse.new_empty(part_lse.shape[1:])


def merge(part_out: Any, part_lse: Any, out: Any, lse: Any, plus_infinity_is_empty: bool) -> tuple[Any, Any]:
    """chiasma.merge() through the operators."""
    if out is None and lse is None:
        result: tuple[Any, Any] = torch.ops.chiasma.merge(part_out, part_lse, plus_infinity_is_empty)
        return result
    out = part_out.new_empty(part_out.shape[1:]) if out is None else out
    lse = part_lse.new_empty(part_lse.shape[1:]) if lse is None else lse
    torch.ops.chiasma.merge_out(part_out, part_lse, out, lse, plus_infinity_is_empty)
    return out, lse
