"""Whose tensor an argument is, and whether it has memory to work with."""

from __future__ import annotations

import sys
from typing import Any

from ._adapters import CuPy, Framework, Jax, NumPy, Torch, is_jax

_NAMED = "PyTorch, JAX, CuPy or NumPy"
_TORCH, _NUMPY, _CUPY, _JAX = Torch(), NumPy(), CuPy(), Jax()


def not_a_tensor(name: str, value: object) -> str:
    given = "None" if value is None else f"a {_type_name(value)}"
    return f"{name} is {given}; it must be a tensor of {_NAMED}, or another with __dlpack__"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def of(name: str, tensor: Any) -> Framework:
    """The framework of an argument that decides in whose tensors results come back. TypeError for what is none."""
    framework = _find(tensor)
    if framework is not None:
        return framework
    if hasattr(type(tensor), "__dlpack__"):
        raise TypeError(f"{name} is a {_type_name(tensor)}; results can only come back as tensors of {_NAMED}")
    raise TypeError(not_a_tensor(name, tensor))


def _find(tensor: Any) -> Framework | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _TORCH
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _NUMPY
    if is_jax(tensor):
        return _JAX
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(tensor, cupy.ndarray):
        return _CUPY
    return None


def export(name: str, tensor: Any, written: bool = False) -> Any:
    """What tvm-ffi takes for an argument; None stays None."""
    if tensor is None:
        return None
    framework = _find(tensor)
    if framework is None:
        if not hasattr(type(tensor), "__dlpack__"):
            raise TypeError(not_a_tensor(name, tensor))
        return tensor
    if written and not framework.writable:
        raise ValueError(f"{name} is a JAX array, which cannot be written in place")
    if written and framework is _NUMPY and not tensor.flags.writeable:
        raise ValueError(f"{name} is read-only; it must be writable")
    check_usable(name, tensor)
    return framework.export(tensor)


def check_usable(name: str, tensor: Any) -> None:
    """Raises for a PyTorch tensor without plain memory behind it. Others pass."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on device {tensor.device}; allowed are cpu and cuda")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; it must be torch.strided: {name}.to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"{name} has dtype {tensor.dtype}, PyTorch's own quantisation; pass plain bytes")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{name} is a view whose sign is yet to be changed; pass {name}.resolve_neg().resolve_conj()")
    if tensor.numel() == 0:
        return
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < needed:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but its memory was freed (storage of "
                         f"{tensor.untyped_storage().nbytes()} bytes)")


def workspace(framework: Framework, num_bytes: int, like: Any) -> Any:
    """Scratch memory at a multiple of 256."""
    memory = framework.empty([num_bytes + 256], "uint8", like)
    begin = -framework.address(memory) % 256
    return memory[begin : begin + num_bytes] if begin else memory
