"""Checks that every call makes before the library makes its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from . import _native
from ._adapters import Framework

SCALES = {"pow2": 1, "amax": 2}

torch: Any = sys.modules.get("torch")


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


def narrow_indices(framework: Framework, name: str, indices: Any, like: Any, stream: int | None) -> Any:
    """int32 slots of int64 ones; what does not fit becomes -1. int32 passes as it is."""
    if indices is None or str(indices.dtype).removeprefix("torch.") != "int64":
        return indices
    slots = framework.empty(tuple(indices.shape), "int32", like)
    names = (name, "block_table", "request", "out")
    _native.call(_native.translate_indices, names, indices, None, None, slots, 0, 0, 0, 0, stream)
    return slots
