"""Checks that every call makes before the library makes its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from . import _frameworks, _native
from ._adapters import Framework

FORMATS = {"v32": 1, "v4": 2, "bf16": 3}
SCALES = {"pow2": 1, "amax": 2}
INFERRED = 0
KEY_DIMS = {1: 576, 2: 512, 3: 576}

torch: Any = sys.modules.get("torch")


def format_number(format: str | None) -> int:
    if format is None:
        return INFERRED
    if isinstance(format, str) and format in FORMATS:
        return FORMATS[format]
    raise ValueError(f"format is {format!r}; allowed are 'v32', 'v4', 'bf16' and None (by the width of kv_cache)")


def scale_number(scale: str) -> int:
    if isinstance(scale, str) and scale in SCALES:
        return SCALES[scale]
    raise ValueError(f"scale is {scale!r}; allowed are 'pow2' and 'amax'")


def goes_through_ops(*tensors: Any) -> bool:
    """Whether PyTorch has to dispatch: torch.compile is tracing, or a tensor subclass (a fake tensor, a tracer's) wants
    to see operators."""
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    return any(
        isinstance(tensor, torch.Tensor)
        and type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        for tensor in tensors
    )


def refuse_gradients(named: Iterable[tuple[str, Any]]) -> None:
    """There is no backward, and leaving gradients out silently would be wrong."""
    if torch is None or not torch.is_grad_enabled():
        return
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name} requires grad, and chiasma has no backward: call it under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def infer_format(name: str, kv_cache: Any, format: str | None) -> int:
    """The number of a format: the one given, or the one whose width the cache has."""
    number = format_number(format)
    if number != INFERRED:
        return number
    shape, dtype = getattr(kv_cache, "shape", None), str(getattr(kv_cache, "dtype", "")).removeprefix("torch.")
    if shape is None:
        raise TypeError(_frameworks.not_a_tensor(name, kv_cache))
    width = shape[-1] if len(shape) > 0 else 0
    if dtype in ("uint8", "int8", "float8_e4m3fn"):
        # Comparisons, not a lookup: while torch.compile traces, a width may be a symbol.
        number = 1 if width == 656 else 2 if width == 584 else INFERRED
    elif dtype in ("bfloat16", "uint16"):
        number = 3 if width == 576 else INFERRED
    else:
        raise TypeError(f"{name} has dtype {dtype}; it must be uint8, int8, float8_e4m3fn or bfloat16")
    if number == INFERRED:
        raise ValueError(
            f"{name} has shape {list(shape)} and dtype {dtype}; no format is {width} wide. Formats: v32 (uint8, 656 "
            "wide), v4 (uint8, 584 wide), bf16 (bfloat16, 576 wide)"
        )
    return number


def narrow_indices(framework: Framework, name: str, indices: Any, like: Any, stream: int | None) -> Any:
    """int32 slots of int64 ones; what does not fit becomes -1. int32 passes as it is."""
    if indices is None or str(indices.dtype).removeprefix("torch.") != "int64":
        return indices
    slots = framework.empty(tuple(indices.shape), "int32", like)
    names = (name, "block_table", "request", "out")
    _native.call(_native.translate_indices, names, indices, None, None, slots, 0, 0, 0, 0, stream)
    return slots
