"""The native module: its functions, and exceptions from the texts that they return instead of throwing.

A function returns None, or data, or on failure a str whose first character says which exception it is. That keeps
stack traces to the caller's own lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tvm_ffi

from . import _frameworks

_module = tvm_ffi.load_module(str(Path(__file__).with_name("_chiasma.so")))


def _function(name: str) -> Any:
    return _module.get_function(name)


decode = _function("decode")
plan = _function("plan")
merge = _function("merge")
quantize = _function("quantize")
dequantize = _function("dequantize")
gather_dequantize = _function("gather_dequantize")
translate_indices = _function("translate_indices")
_version = _function("version")
_kernels = _function("kernels")
_devices = _function("devices")
_formats = _function("formats")
_page_bytes = _function("page_bytes")
_synchronize = _function("synchronize")

_EXCEPTIONS: dict[str, type[Exception]] = {
    "V": ValueError,
    "T": TypeError,
    "N": NotImplementedError,
    "R": RuntimeError,
    "M": MemoryError,
}
_LOOK_FIRST = "S"
_NOT_A_TENSOR = "X"
_NO_FORMAT = "F"


def call(function: Any, names: Sequence[str], *arguments: Any) -> Any:
    """function(*arguments, checked), or the exception that its failure means. names are those of the first arguments,
    which are the tensors."""
    try:
        result = function(*arguments, False)
    except Exception as error:
        # tvm-ffi could not take a tensor. If it is one that we can tell why about, that is the better message.
        for name, value in zip(names, arguments):
            _frameworks.check_usable(name, value)
        raise ValueError(f"a tensor could not be read through DLPack: {error}") from error
    if isinstance(result, str):
        return _after_failure(function, names, arguments, result)
    return result


def _after_failure(function: Any, names: Sequence[str], arguments: tuple[Any, ...], failure: str) -> Any:
    if failure[0] == _LOOK_FIRST:
        for name, value in zip(names, arguments):
            _frameworks.check_usable(name, value)
        result = function(*arguments, True)
        if not isinstance(result, str):
            return result
        failure = result
    raise_failure(failure, dict(zip(names, arguments)))


def raise_failure(failure: str, arguments: dict[str, Any]) -> NoReturn:
    """Raises what a failure's text says."""
    kind, message = failure[0], failure[1:]
    if kind == _NOT_A_TENSOR:
        value = arguments.get(message)
        raise TypeError(_frameworks.not_a_tensor(message, value))
    if kind == _NO_FORMAT:
        from . import _formats  # it asks this module for the list

        _formats.infer_format(message, arguments[message], None)
    raise _EXCEPTIONS[kind](message)


def _row(values: Any) -> tuple[Any, ...]:
    """tvm-ffi's own kind of str becomes a plain one."""
    return tuple(str(value) if isinstance(value, str) else value for value in values)


def _query(function: Any, *arguments: Any) -> Any:
    result = function(*arguments)
    if isinstance(result, str):
        raise_failure(result, {})
    return result


def plan_row(names: Sequence[str], *arguments: Any) -> tuple[Any, ...]:
    """kernel, workspace_bytes and text of a plan."""
    return _row(call(plan, names, *arguments))


def version() -> str:
    return str(_query(_version)[0])


def kernels() -> list[tuple[Any, ...]]:
    return [_row(row) for row in _query(_kernels)]


def devices() -> list[tuple[Any, ...]]:
    return [_row(row) for row in _query(_devices)]


def formats() -> list[tuple[Any, ...]]:
    """name, key width, last extent of a cache, whether that is bytes, whether it and the dtype tell the format."""
    return [_row(row) for row in _query(_formats)]


def page_bytes(format_number: int, page: int) -> int:
    """Bytes from one page to the next of a new cache."""
    return int(_query(_page_bytes, format_number, page)[0])


def synchronize(device_index: int, stream: int) -> None:
    """Waits for a CUDA stream of a device."""
    _query(_synchronize, device_index, stream)
