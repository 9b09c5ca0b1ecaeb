"""What the calls need of PyTorch, NumPy, CuPy and JAX: how a tensor gets through DLPack, who allocates, which stream.

A framework is never imported unless the caller has done so: a tensor of it could not be here otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol



class Framework(Protocol):
    """What the calls need of a framework. dtype is "bfloat16", "float32", "int32", "int64" or "uint8"."""

    name: str
    writable: bool  # whether arrays can be written in place

    def export(self, tensor: Any) -> Any:
        """The same memory as something that tvm-ffi can take."""

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        """New exportable memory on the device of `like`."""

    def zeroed(self, memory: Any) -> Any:
        """Memory of empty(), filled with zeros."""

    def address(self, memory: Any) -> int:
        """Where memory of empty() begins."""

    def result(self, memory: Any, dtype: str, like: Any) -> Any:
        """A tensor of this framework from memory of empty()."""

    def stack(self, tensors: Sequence[Any]) -> Any:
        """Tensors of one shape along a new first dimension."""

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        """The tensor, or a copy where a view cannot have that shape."""

    def strided(self, memory: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        """Another view of memory of empty()."""

    def stream(self, like: Any) -> int | None:
        """The current CUDA stream; None if tvm-ffi knows it."""

    def finish(self, like: Any) -> None:
        """Called once the work is queued."""


class Torch:
    name = "torch"
    writable = True

    def export(self, tensor: Any) -> Any:
        return tensor

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=like.device)

    def zeroed(self, memory: Any) -> Any:
        return memory.zero_()

    def address(self, memory: Any) -> int:
        return int(memory.data_ptr())

    def result(self, memory: Any, dtype: str, like: Any) -> Any:
        return memory

    def stack(self, tensors: Sequence[Any]) -> Any:
        return sys.modules["torch"].stack(list(tensors))

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return tensor.reshape(tuple(shape))

    def strided(self, memory: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        return memory.as_strided(tuple(shape), tuple(strides))

    def stream(self, like: Any) -> int | None:
        return None

    def finish(self, like: Any) -> None:
        pass


class _ReadOnly:
    """Offers a read-only array's memory as if it could be written, which DLPack wants; inputs are not written."""

    def __init__(self, array: Any) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


class NumPy:
    name = "numpy"
    writable = True

    def export(self, tensor: Any) -> Any:
        return _as_plain_bits(tensor if tensor.flags.writeable else _writable(tensor))

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        return sys.modules["numpy"].empty(tuple(shape), "uint16" if dtype == "bfloat16" else dtype)

    def zeroed(self, memory: Any) -> Any:
        memory.fill(0)
        return memory

    def address(self, memory: Any) -> int:
        return int(memory.ctypes.data)

    def result(self, memory: Any, dtype: str, like: Any) -> Any:
        return memory.view(_bfloat16(like)) if dtype == "bfloat16" else memory

    def stack(self, tensors: Sequence[Any]) -> Any:
        return sys.modules["numpy"].stack(list(tensors))

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return tensor.reshape(tuple(shape))

    def strided(self, memory: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        numpy = sys.modules["numpy"]
        byte_strides = [stride * memory.itemsize for stride in strides]
        return numpy.lib.stride_tricks.as_strided(memory, tuple(shape), byte_strides)

    def stream(self, like: Any) -> int | None:
        return 0

    def finish(self, like: Any) -> None:
        pass


class CuPy(NumPy):
    name = "cupy"

    def export(self, tensor: Any) -> Any:
        return _as_plain_bits(tensor)

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        cupy = sys.modules["cupy"]
        with like.device:
            return cupy.empty(tuple(shape), "uint16" if dtype == "bfloat16" else dtype)

    def address(self, memory: Any) -> int:
        return int(memory.data.ptr)

    def stack(self, tensors: Sequence[Any]) -> Any:
        return sys.modules["cupy"].stack(list(tensors))

    def strided(self, memory: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        cupy = sys.modules["cupy"]
        byte_strides = [stride * memory.itemsize for stride in strides]
        return cupy.lib.stride_tricks.as_strided(memory, tuple(shape), byte_strides)

    def stream(self, like: Any) -> int | None:
        with like.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


class Jax:
    """JAX arrays cannot be written, and their streams are XLA's own: inputs are waited for, results are complete on
    return. On the CPU results are computed in NumPy memory, on a GPU in new arrays that nobody else has seen yet."""

    name = "jax"
    writable = False

    def export(self, tensor: Any) -> Any:
        if not is_jax(tensor):
            return tensor  # memory of empty() on the CPU
        tensor.block_until_ready()
        return tensor

    def empty(self, shape: Sequence[int], dtype: str, like: Any) -> Any:
        if not _is_on_gpu(like):
            import numpy

            return numpy.empty(tuple(shape), "uint16" if dtype == "bfloat16" else dtype)
        jax = sys.modules["jax"]
        return jax.numpy.empty(tuple(shape), dtype, device=_jax_device(like)).block_until_ready()

    def zeroed(self, memory: Any) -> Any:
        if is_jax(memory):
            return sys.modules["jax"].numpy.zeros_like(memory).block_until_ready()
        memory.fill(0)
        return memory

    def address(self, memory: Any) -> int:
        return int(memory.unsafe_buffer_pointer()) if is_jax(memory) else int(memory.ctypes.data)

    def result(self, memory: Any, dtype: str, like: Any) -> Any:
        if is_jax(memory):
            return memory
        jax = sys.modules["jax"]
        values = memory.view(jax.numpy.bfloat16) if dtype == "bfloat16" else memory
        return jax.numpy.array(values, device=_jax_device(like))

    def stack(self, tensors: Sequence[Any]) -> Any:
        return sys.modules["jax"].numpy.stack(list(tensors))

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return tensor.reshape(tuple(shape))

    def strided(self, memory: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        raise ValueError("a JAX array has no strides: this page size needs padding behind each page, choose another")

    def stream(self, like: Any) -> int | None:
        return 0

    def finish(self, like: Any) -> None:
        if _is_on_gpu(like):
            from . import _native

            _native.synchronize(int(_jax_device(like).local_hardware_id), 0)


def is_jax(tensor: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(tensor, jax.Array)


def _jax_device(array: Any) -> Any:
    return next(iter(array.devices()))


def _is_on_gpu(array: Any) -> bool:
    return str(_jax_device(array).platform) in ("gpu", "cuda")


def _writable(array: Any) -> Any:
    plain = _as_plain_bits(array)
    return sys.modules["numpy"].asarray(_ReadOnly(plain))


def _as_plain_bits(array: Any) -> Any:
    """Dtypes that NumPy has from ml_dtypes only and DLPack does not take from it."""
    name = str(array.dtype)
    if name == "bfloat16":
        return array.view("uint16")
    return array.view("uint8") if name == "float8_e4m3fn" else array


def _bfloat16(like: Any) -> Any:
    """bfloat16 for an array, or uint16 if the caller does without it."""
    if str(like.dtype) == "uint16":
        return "uint16"
    try:
        import ml_dtypes
    except ImportError:
        return "uint16"
    return ml_dtypes.bfloat16
