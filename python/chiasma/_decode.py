"""decode, plan and merge."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import _frameworks, _native
from ._arguments import goes_through_ops, narrow_indices, refuse_gradients
from ._formats import format_number
from ._types import Plan

_NAMES = (
    "q",
    "q_pe",
    "kv_cache",
    "indices",
    "topk_length",
    "attn_sink",
    "extra_kv_cache",
    "extra_indices",
    "extra_topk_length",
    "out",
    "lse",
)
_OUT, _LSE = 9, 10
_VALUE_DIM = 512
_native_decode = _native.decode
_native_call = _native.call

# tvm-ffi imports PyTorch where it is installed, so that it is known now whether the fast path can ever be taken.
_torch: Any = sys.modules.get("torch")
if _torch is not None:
    from . import _torch_ops

    _Tensor = _torch.Tensor
    _is_compiling = _torch.compiler.is_compiling
    _is_grad_enabled = _torch.is_grad_enabled
    _float32 = _torch.float32
else:

    class _Tensor:  # type: ignore[no-redef]
        pass

    def _is_compiling() -> bool:
        return False


def decode(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    format: str | None = None,
    kv_scale: float | None = None,
    sm_scale: float | None = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> tuple[Any, Any]:
    """Attention of query tokens over the cache slots selected for each: softmax(sm_scale * q . K) V.

    Args:
        q: bfloat16 [b, s_q, h_q, d_qk], the last 64 columns rotary; or a pair (q_nope [..., d_qk - 64],
            q_pe [..., 64]) of tensors that were never joined. Any strides, the last dimension contiguous. With rank 3,
            [T, h_q, d_qk], there is no s_q and the other tensors have one dimension less, too.
        kv_cache: uint8, int8 or float8_e4m3fn bytes [num_pages, page, width], or bfloat16 for bf16 and bf16nope; or
            with a head dimension of 1 before the last. Any page size; stride(0) is any multiple of 16 bytes that holds
            a page.
        indices: int32 or int64 [b, s_q, topk], slots: page_index * page + offset. What is not in the cache, -1
            included, is masked, wherever it stands.
        format: of kv_cache; its width in parentheses.
            d_qk 576: "v32" (656), "fp8" (576), "bf16" (576).
            d_qk 512: "v4" (584), "v41" (528), "v41plane" (528), "v32nope" (656), "v32nope_compact" (528), "fp8nope"
            (512), "bf16nope" (512).
            None: told by dtype and width, as v32, v4, bf16 or bf16nope; the others have to be named.
        kv_scale: fp8 and fp8nope: what every code of the cache is multiplied by, > 0; None: 1.
        sm_scale: any finite number; None: d_qk ** -0.5.
        topk_length: int32 [b] or [b, s_q] ([T]): how many leftmost entries of a row count.
        attn_sink: float32 [h_q]; scales out by exp(lse) / (exp(lse) + exp(sink)), leaves lse alone.
        extra_kv_cache, extra_indices, extra_topk_length: a second cache of the same format, v4, v41 or v41plane, with
            a page size of its own, attended together with the first.
        out: bfloat16 [b, s_q, h_q, 512] to write to, any strides, the last dimension contiguous; None: a new one.
        lse: float32 [b, s_q, h_q] to write to, any strides; None: a new one.
        workspace: uint8 scratch memory, plan(...).workspace_bytes at least, at a multiple of 256 bytes; None: from the
            framework's allocator for this call.
        kernel: a name of kernels(); None: the environment's CHIASMA_KERNEL, or the best that fits.
        batch_invariant: whether a request's bits must not depend on what else is in the batch.

    Returns:
        (out, lse), lse in natural logarithm. A row without valid entries has out 0 and lse -inf. PyTorch and CuPy work
        is queued on the current stream; no tensor is kept.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError: see the package. ValueError also if a
            tensor requires grad while grad mode is on: there is no backward.

    >>> out, lse = chiasma.decode(q, kv_cache, indices)
    >>> chiasma.decode((q_nope, q_pe), kv_cache, indices, topk_length=lengths, out=out, lse=lse)
    """
    if _is_compiling():
        return _torch_ops.decode(
            q, kv_cache, indices, format, kv_scale, sm_scale, topk_length, attn_sink, extra_kv_cache, extra_indices,
            extra_topk_length, out, lse, workspace, kernel, batch_invariant,
        )  # fmt: skip
    q_pe = None
    if type(q) is tuple or type(q) is list:
        q, q_pe = _pair(q)
    # Every line here counts: this is what a call costs above the C interface.
    if (
        type(q) is not _Tensor
        or type(kv_cache) is not _Tensor
        or type(indices) is not _Tensor
        or (q_pe is not None and type(q_pe) is not _Tensor)
        or (topk_length is not None and type(topk_length) is not _Tensor)
        or (attn_sink is not None and (type(attn_sink) is not _Tensor or attn_sink.is_neg()))
        or (extra_kv_cache is not None and type(extra_kv_cache) is not _Tensor)
        or (extra_indices is not None and type(extra_indices) is not _Tensor)
        or (extra_topk_length is not None and type(extra_topk_length) is not _Tensor)
        or (out is not None and type(out) is not _Tensor)
        or (lse is not None and type(lse) is not _Tensor)
        or (workspace is not None and type(workspace) is not _Tensor)
    ):
        tensors = (q, q_pe, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length)
        return _decode_any((*tensors, out, lse), format, kv_scale, sm_scale, workspace, kernel, batch_invariant)
    if _is_grad_enabled():
        tensors = (q, q_pe, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length)
        refuse_gradients(zip(_NAMES, (*tensors, out, lse)))
    if out is None or lse is None:
        shape = q.shape
        # Of another rank, the library says what it must be.
        if len(shape) == 4:
            b, s_q, h_q, _ = shape
            out = q.new_empty((b, s_q, h_q, _VALUE_DIM)) if out is None else out
            lse = q.new_empty((b, s_q, h_q), dtype=_float32) if lse is None else lse
        elif len(shape) == 3:
            b, h_q, _ = shape
            out = q.new_empty((b, h_q, _VALUE_DIM)) if out is None else out
            lse = q.new_empty((b, h_q), dtype=_float32) if lse is None else lse
    number = 0 if format is None else format_number(format)
    _native_call(
        _native_decode, _NAMES, q, q_pe, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices,
        extra_topk_length, out, lse, number, kv_scale, sm_scale, kernel, batch_invariant, workspace, None,
    )  # fmt: skip
    return out, lse


def _pair(q: Sequence[Any]) -> tuple[Any, Any]:
    if len(q) != 2:
        raise ValueError(f"q is a sequence of {len(q)} tensors; it must be one tensor or a pair (q_nope, q_pe)")
    if q[1] is None:
        raise TypeError(_frameworks.not_a_tensor("q[1], q_pe,", None))
    return q[0], q[1]


def _decode_any(
    tensors: tuple[Any, ...],
    format: str | None,
    kv_scale: float | None,
    sm_scale: float | None,
    workspace: Any,
    kernel: str | None,
    batch_invariant: bool,
) -> tuple[Any, Any]:
    """decode() for frameworks other than PyTorch, mixtures, and whatever is no tensor."""
    q = tensors[0]
    if goes_through_ops(*tensors):
        (_, q_pe, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_length) = tensors[:9]
        return _torch_ops.decode(
            q if q_pe is None else (q, q_pe), kv_cache, indices, format, kv_scale, sm_scale, topk_length, attn_sink,
            extra_kv_cache, extra_indices, extra_length, tensors[_OUT], tensors[_LSE], workspace, kernel,
            batch_invariant,
        )  # fmt: skip
    framework = _frameworks.of("q", q)
    refuse_gradients(zip(_NAMES, tensors))
    exported = _export_all(tensors)
    lead = tuple(q.shape)[:-1]
    if not 2 <= len(lead) <= 3:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [b, s_q, h_q, d_qk] or [T, h_q, d_qk]")
    for position, shape, dtype in ((_OUT, (*lead, _VALUE_DIM), "bfloat16"), (_LSE, lead, "float32")):
        if exported[position] is None:
            exported[position] = framework.empty(shape, dtype, q)
    stream = framework.stream(q)
    for position in (3, 7):
        exported[position] = narrow_indices(framework, _NAMES[position], exported[position], q, stream)
    number = format_number(format)
    scratch = _frameworks.export("workspace", workspace, written=True)
    if scratch is None:
        needed = _plan(exported, number, kv_scale, sm_scale, kernel, batch_invariant, 0, 0).workspace_bytes
        scratch = _frameworks.workspace(framework, needed, q)
    options = (number, kv_scale, sm_scale, kernel, batch_invariant)
    _native.call(_native.decode, _NAMES, *exported, *options, scratch, stream)
    framework.finish(q)
    results = (
        given if given is not None else framework.result(exported[position], dtype, q)
        for given, position, dtype in ((tensors[_OUT], _OUT, "bfloat16"), (tensors[_LSE], _LSE, "float32"))
    )
    out, lse = results
    return out, lse


def _export_all(tensors: Sequence[Any]) -> list[Any]:
    """The eleven tensors of a decode as tvm-ffi takes them. TypeError for those that are none."""
    for name, tensor in zip(_NAMES, tensors):
        if tensor is None and name in ("q", "kv_cache", "indices"):
            raise TypeError(_frameworks.not_a_tensor(name, None))
    return [
        _frameworks.export(name, tensor, written=name in ("out", "lse")) for name, tensor in zip(_NAMES, tensors)
    ]


def _plan(
    exported: Sequence[Any],
    format: int,
    kv_scale: float | None,
    sm_scale: float | None,
    kernel: str | None,
    batch_invariant: bool,
    num_splits: int,
    num_threads: int,
) -> Plan:
    options = (format, kv_scale, sm_scale, kernel, batch_invariant, num_splits, num_threads)
    return Plan(*_native.plan_row(_NAMES, *exported, *options))


def plan(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    format: str | None = None,
    kv_scale: float | None = None,
    sm_scale: float | None = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    out: Any = None,
    lse: Any = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
    num_splits: int = 0,
    num_threads: int = 0,
) -> Plan:
    """What decode() will do for these arguments: print(plan) explains it. Only shapes, strides, dtypes and devices
    matter, not contents, so that a plan stays right when a CUDA graph is replayed with other data.

    Args:
        num_splits: parts that each row of indices is divided into; 0: automatic.
        num_threads: CPU only, worker threads; 0: all. Never changes a result.
        The others are those of decode().

    >>> chiasma.plan(q, kv_cache, indices).workspace_bytes
    """
    q_pe = None
    if isinstance(q, (tuple, list)):
        q, q_pe = _pair(q)
    tensors = (q, q_pe, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length)
    exported = _export_all((*tensors, out, lse))
    return _plan(exported, format_number(format), kv_scale, sm_scale, kernel, batch_invariant, num_splits, num_threads)


def merge(
    part_out: Any, part_lse: Any, *, out: Any = None, lse: Any = None, plus_infinity_is_empty: bool = False
) -> tuple[Any, Any]:
    """Combines results over disjoint sets of KV tokens, as context parallelism needs:
    lse = log(sum_i exp(lse_i)), out = sum_i exp(lse_i - lse) * out_i, in float64, with the same bits on every device.

    A part with lse -inf adds nothing, whatever its out holds; parts that are all empty give (0, -inf). An lse of NaN
    makes its row NaN, and so does +inf without plus_infinity_is_empty.

    Args:
        part_out: bfloat16 or float32 [parts, b, s_q, h_q, 512], or a sequence of tensors [b, s_q, h_q, 512]; or
            without s_q.
        part_lse: float32 [parts, b, s_q, h_q], or a sequence likewise.
        out: bfloat16 or float32 [b, s_q, h_q, 512] to write to; None: a new one of part_out's dtype.
        lse: float32 [b, s_q, h_q] to write to; None: a new one.
        plus_infinity_is_empty: +inf, too, is the lse of a part without tokens, as flash_mla writes it.

    Returns:
        (out, lse)

    >>> out, lse = chiasma.merge([out_0, out_1], [lse_0, lse_1])
    """
    part_out = _stacked("part_out", part_out)
    part_lse = _stacked("part_lse", part_lse)
    if goes_through_ops(part_out, part_lse, out, lse):
        return _torch_ops.merge(part_out, part_lse, out, lse, plus_infinity_is_empty)
    framework = _frameworks.of("part_out", part_out)
    names = ("part_out", "part_lse", "out", "lse")
    refuse_gradients(zip(names, (part_out, part_lse, out, lse)))
    inputs = [_frameworks.export("part_out", part_out), _frameworks.export("part_lse", part_lse)]
    lead = tuple(part_out.shape)[1:-1]
    dtype = "float32" if str(part_out.dtype).endswith("float32") else "bfloat16"
    results = [_frameworks.export("out", out, written=True), _frameworks.export("lse", lse, written=True)]
    results[0] = framework.empty((*lead, _VALUE_DIM), dtype, part_out) if out is None else results[0]
    results[1] = framework.empty(lead, "float32", part_out) if lse is None else results[1]
    is_empty = bool(plus_infinity_is_empty)
    _native.call(_native.merge, names, *inputs, *results, is_empty, framework.stream(part_out))
    framework.finish(part_out)
    return (
        framework.result(results[0], dtype, part_out) if out is None else out,
        framework.result(results[1], "float32", part_out) if lse is None else lse,
    )


def _stacked(name: str, parts: Any) -> Any:
    if not isinstance(parts, (tuple, list)):
        return parts
    if not parts:
        raise ValueError(f"{name} is an empty sequence; there must be at least one part")
    try:
        return _frameworks.of(f"{name}[0]", parts[0]).stack(parts)
    except RuntimeError as error:
        raise ValueError(f"{name}: parts that cannot be stacked: {error}") from error
