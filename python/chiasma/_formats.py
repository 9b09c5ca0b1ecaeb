"""The cache formats, as the library lists them, and how a cache tells its own."""

from __future__ import annotations

from typing import Any

from . import _frameworks, _native

INFERRED = 0
_ROWS = _native.formats()

#: From a name to its number, and from a number to the rest.
NUMBERS = {row[0]: number for number, row in enumerate(_ROWS, 1)}
NAMES = {number: name for name, number in NUMBERS.items()}
KEY_DIMS = {number: row[1] for number, row in enumerate(_ROWS, 1)}
WIDTHS = {number: row[2] for number, row in enumerate(_ROWS, 1)}
CACHE_DTYPES = {number: "uint8" if row[3] else "bfloat16" for number, row in enumerate(_ROWS, 1)}
#: To which writers round the bytes of a page up. The library's own function cannot be asked about a size that is a
#: symbol, as while torch.compile traces; where no number stands here, rows need no rounding.
PAGE_MULTIPLES = {NUMBERS["v4"]: 576, NUMBERS["v41plane"]: 512}

_BYTES = ("uint8", "int8", "float8_e4m3fn")
_NUMBERS_16_BIT = ("bfloat16", "uint16")
_INFERRED_BYTES = tuple((row[2], number) for number, row in enumerate(_ROWS, 1) if row[4] and row[3])
_INFERRED_BF16 = tuple((row[2], number) for number, row in enumerate(_ROWS, 1) if row[4] and not row[3])


def format_number(format: str | None) -> int:
    if format is None:
        return INFERRED
    if isinstance(format, str) and format in NUMBERS:
        return NUMBERS[format]
    names = ", ".join(repr(name) for name in NUMBERS)
    raise ValueError(f"format is {format!r}; allowed are {names} and None (by the dtype and width of kv_cache)")


def infer_format(name: str, kv_cache: Any, format: str | None) -> int:
    """The number of a format: the one given, or the only one that a cache of this dtype and width can have."""
    number = format_number(format)
    if number != INFERRED:
        return number
    shape, dtype = getattr(kv_cache, "shape", None), str(getattr(kv_cache, "dtype", "")).removeprefix("torch.")
    if shape is None and hasattr(type(kv_cache), "__dlpack__"):
        raise ValueError(f"{name} is a tensor without a shape attribute; its format has to be named")
    if shape is None:
        raise TypeError(_frameworks.not_a_tensor(name, kv_cache))
    if dtype not in _BYTES and dtype not in _NUMBERS_16_BIT:
        raise TypeError(f"{name} has dtype {dtype}; it must be uint8, int8, float8_e4m3fn or bfloat16")
    width = shape[-1] if len(shape) > 0 else 0
    # Comparisons, not a lookup: while torch.compile traces, a width may be a symbol.
    for known_width, number in _INFERRED_BYTES if dtype in _BYTES else _INFERRED_BF16:
        if width == known_width:
            return number
    raise ValueError(no_format(name, shape, dtype))


def no_format(name: str, shape: Any, dtype: str) -> str:
    """The message for a cache whose format has to be named, or that has none."""
    width = shape[-1] if len(shape) > 0 else 0
    alike = [NAMES[n] for n in NAMES if WIDTHS[n] == width and (CACHE_DTYPES[n] == "uint8") == (dtype in _BYTES)]
    if alike:
        reason = f"that does not tell its format, name one: format={' or '.join(repr(name) for name in alike)}"
    else:
        reason = f"no format is {width} wide"
    expected = ", ".join(
        f"{NAMES[n]} ({CACHE_DTYPES[n]}, {WIDTHS[n]} wide, d_qk {KEY_DIMS[n]})" for n in sorted(NAMES)
    )
    return f"{name} has shape {list(shape)} and dtype {dtype}; {reason}. Formats: {expected}"
