"""The installed package without PyTorch: a program for an environment that has NumPy alone. Writes and decodes a cache of
every format and holds the results against float64."""

from __future__ import annotations

import sys

import numpy

import chiasma

KEY_DIMS = {"v32": 576, "fp8": 576, "bf16": 576, "v4": 512, "v41": 512, "v41plane": 512}
KEY_DIMS |= {"v32nope": 512, "v32nope_compact": 512, "fp8nope": 512, "bf16nope": 512}


def bf16_bits(values: numpy.ndarray) -> numpy.ndarray:
    """The upper halves of float32 numbers, cut off."""
    return (values.astype(numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)


def widened(bits: numpy.ndarray) -> numpy.ndarray:
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)


def worst_error(fmt: str, d_qk: int) -> float:
    """Largest relative error of a head."""
    generator = numpy.random.default_rng(1)
    options = {"format": fmt, "kv_scale": 0.05 if fmt.startswith("fp8") else None}
    q = bf16_bits(generator.standard_normal((2, 1, 8, d_qk)))
    cache = chiasma.quantize(bf16_bits(generator.standard_normal((3, 16, d_qk))), **options)
    indices = generator.integers(0, 48, (2, 1, 20), dtype=numpy.int32)
    out, lse = chiasma.decode(q, cache, indices, **options)
    rows = chiasma.dequantize(cache, **options).reshape(48, d_qk).astype(numpy.float64)[indices]
    scores = numpy.einsum("bshd,bskd->bshk", widened(q), rows) * d_qk**-0.5
    want_lse = numpy.log(numpy.exp(scores).sum(-1))
    want = numpy.einsum("bshk,bskd->bshd", numpy.exp(scores - want_lse[..., None]), rows[..., :512])
    assert numpy.abs(lse - want_lse).max() < 1e-4
    error = numpy.linalg.norm(widened(out) - want, axis=-1) / numpy.linalg.norm(want, axis=-1)
    return float(error.max())


def main() -> None:
    assert "torch" not in sys.modules, "PyTorch is here; this is about its absence"
    errors = {fmt: worst_error(fmt, d_qk) for fmt, d_qk in KEY_DIMS.items()}
    assert max(errors.values()) < 4e-3, errors
    print(f"chiasma {chiasma.__version__} with NumPy alone: {len(errors)} formats right, by {chiasma.kernels()[0].name}")


if __name__ == "__main__":
    main()
