"""The same bytes through PyTorch, NumPy, JAX and CuPy: the same bits out, in the framework that q came from."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import chiasma

from reference import DECODE_FORMATS, FORMATS, KEY_DIM, SECOND_CACHE, cache_options, kv_scale_of

ml_dtypes = pytest.importorskip("ml_dtypes")
NO_CUDA = "no CUDA device: nothing of this was run on a GPU"


def inputs(fmt: str) -> dict[str, torch.Tensor]:
    """A decode of PyTorch tensors on the CPU, with every optional input that the format has."""
    generator = torch.Generator().manual_seed(7)
    d_qk = KEY_DIM[fmt]
    kv = torch.randn(3, 8, d_qk, generator=generator).bfloat16()
    cache = chiasma.quantize(kv, format=fmt, kv_scale=kv_scale_of(fmt))
    arguments = {
        "q": torch.randn(2, 3, 4, d_qk, generator=generator).bfloat16(),
        "kv_cache": cache,
        "indices": torch.randint(-3, 24, (2, 3, 9), generator=generator, dtype=torch.int32),
        "topk_length": torch.tensor([9, 5], dtype=torch.int32),
        "attn_sink": torch.randn(4, generator=generator),
    }
    if fmt in SECOND_CACHE:
        arguments["extra_kv_cache"] = chiasma.quantize(kv.flip(0)[:, :6], format=fmt)
        arguments["extra_indices"] = torch.randint(-3, 18, (2, 3, 4), generator=generator, dtype=torch.int32)
    return arguments


def as_numpy(tensor: torch.Tensor, raw: bool = False) -> Any:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bits = tensor.view(torch.uint16).numpy()
    return bits if raw else bits.view(ml_dtypes.bfloat16)


def bits(array: Any) -> Any:
    """A result's bytes, whatever it is."""
    if isinstance(array, torch.Tensor):
        array = as_numpy(array.cpu())
    elif not isinstance(array, numpy.ndarray):
        array = array.get() if hasattr(array, "get") else numpy.asarray(array)
    return numpy.ascontiguousarray(array).view(numpy.uint8)


def assert_same(results: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for result, reference in zip(results, expected):
        assert tuple(result.shape) == tuple(reference.shape)
        assert (bits(result) == bits(reference)).all()


@pytest.mark.parametrize("raw", [False, True], ids=["ml_dtypes", "uint16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_numpy(fmt: str, raw: bool) -> None:
    tensors = inputs(fmt)
    arguments = {name: as_numpy(tensor, raw) for name, tensor in tensors.items()}
    options = cache_options(fmt)
    expected = chiasma.decode(**tensors, **options)
    out, lse = chiasma.decode(**arguments, **options)
    assert isinstance(out, numpy.ndarray) and out.dtype == (numpy.uint16 if raw else ml_dtypes.bfloat16)
    assert isinstance(lse, numpy.ndarray) and lse.dtype == numpy.float32
    assert_same((out, lse), expected)
    for array in arguments.values():
        array.flags.writeable = False
    arguments["indices"] = arguments["indices"].astype(numpy.int64)
    given = numpy.empty_like(out), numpy.empty_like(lse)
    result = chiasma.decode(**arguments, **options, out=given[0], lse=given[1])
    assert result[0] is given[0] and result[1] is given[1]
    assert_same(result, expected)


def test_numpy_refuses_what_it_must() -> None:
    arguments = {name: as_numpy(tensor) for name, tensor in inputs("v32").items()}
    frozen = numpy.empty((2, 3, 4), numpy.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="lse is read-only"):
        chiasma.decode(**arguments, lse=frozen)
    with pytest.raises(TypeError, match="q has dtype float32"):
        chiasma.decode(**(arguments | {"q": arguments["q"].astype(numpy.float32)}))
    with pytest.raises(ValueError, match="kv_cache.*stride"):
        chiasma.decode(**(arguments | {"kv_cache": arguments["kv_cache"][::-1]}))
    with pytest.raises(TypeError, match="indices is a builtins.list"):
        chiasma.decode(**(arguments | {"indices": [[0]]}))


def test_numpy_cache_operations() -> None:
    kv = torch.randn(3, 8, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    for fmt in FORMATS:
        rows, options = kv[..., : KEY_DIM[fmt]].contiguous(), cache_options(fmt)
        written = {"format": fmt, "kv_scale": kv_scale_of(fmt)}
        cache = chiasma.quantize(rows, **written)
        array = chiasma.quantize(as_numpy(rows), **written)
        assert isinstance(array, numpy.ndarray)
        assert array.strides == tuple(stride * cache.element_size() for stride in cache.stride())
        plain = chiasma.dequantize(cache, **options)
        assert (bits(chiasma.dequantize(array, **options)) == bits(plain)).all()
        narrow = chiasma.dequantize(array, dtype=ml_dtypes.bfloat16, **options)
        assert (bits(narrow) == bits(chiasma.dequantize(cache, dtype=torch.bfloat16, **options))).all()
        slots = numpy.array([4, -1, 23])
        gathered = chiasma.gather_dequantize(array, slots, **options)
        assert gathered.dtype == ml_dtypes.bfloat16
        assert (bits(gathered) == bits(chiasma.gather_dequantize(cache, torch.from_numpy(slots), **options))).all()
    tokens = numpy.array([[0, 9, -1, 7]])
    table = numpy.array([[2, 1]], numpy.int32)
    assert chiasma.translate_indices(tokens, table, page=8).tolist() == [[16, 9, -1, 23]]
    part, part_lse = numpy.ones((2, 1, 1, 1, 512), numpy.float32), numpy.zeros((2, 1, 1, 1), numpy.float32)
    out, lse = chiasma.merge(part, part_lse)
    assert (out == 1).all() and lse == numpy.float32(numpy.log(2))


def test_mixed_frameworks_give_q_the_result() -> None:
    tensors = inputs("v32")
    expected = chiasma.decode(**tensors)
    mixed: dict[str, Any] = dict(tensors)
    mixed["kv_cache"], mixed["indices"] = as_numpy(tensors["kv_cache"]), as_numpy(tensors["indices"])
    result = chiasma.decode(**mixed)
    assert all(isinstance(tensor, torch.Tensor) for tensor in result)
    assert_same(result, expected)
    mixed["q"] = as_numpy(tensors["q"])
    result = chiasma.decode(**mixed)
    assert all(isinstance(array, numpy.ndarray) for array in result)
    assert_same(result, expected)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_jax(fmt: str, platform: str) -> None:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices(platform)[0]
    except RuntimeError:
        pytest.skip(NO_CUDA if platform == "gpu" else "this JAX has no CPU")
    tensors = inputs(fmt)
    if platform == "gpu" and fmt not in DECODE_FORMATS["cuda"]:
        pytest.skip("no CUDA kernel for this format")
    arrays = {name: jax.device_put(as_numpy(tensor), device) for name, tensor in tensors.items()}
    torch_device = "cuda" if platform == "gpu" else "cpu"
    options = cache_options(fmt)
    expected = chiasma.decode(**{name: tensor.to(torch_device) for name, tensor in tensors.items()}, **options)
    results = chiasma.decode(**arrays, **options)
    assert all(isinstance(array, jax.Array) and array.devices() == {device} for array in results)
    assert results[0].dtype == jax.numpy.bfloat16 and results[1].dtype == jax.numpy.float32
    assert_same(results, expected)
    # What JAX computes next sees the results.
    assert float(abs(results[0].astype(jax.numpy.float32)).sum()) > 0
    with pytest.raises(ValueError, match="out is a JAX array"):
        chiasma.decode(**arrays, **options, out=results[0])


def test_jax_cache_operations() -> None:
    jax = pytest.importorskip("jax")
    kv = torch.randn(3, 8, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows = jax.numpy.asarray(as_numpy(kv))
    cache = chiasma.quantize(rows)
    assert isinstance(cache, jax.Array) and (bits(cache) == bits(chiasma.quantize(kv))).all()
    assert (bits(chiasma.dequantize(cache)) == bits(chiasma.dequantize(chiasma.quantize(kv)))).all()
    with pytest.raises(ValueError, match="kv_cache is a JAX array"):
        chiasma.quantize_and_append(rows[0, :, :512], rows[0, :, 512:], cache, jax.numpy.zeros(8, int))


@pytest.fixture
def cupy() -> Any:
    if not torch.cuda.is_available():
        pytest.skip(NO_CUDA)
    return pytest.importorskip("cupy")


def test_cupy(cupy: Any) -> None:
    tensors = inputs("v32")
    expected = chiasma.decode(**{name: tensor.cuda() for name, tensor in tensors.items()})
    arrays = {name: cupy.asarray(as_numpy(tensor, raw=True)) for name, tensor in tensors.items()}
    for values in (arrays, arrays | {"indices": arrays["indices"].astype(cupy.int64)}):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            cupy.cuda.runtime.deviceSynchronize()
            out, lse = chiasma.decode(**values)
            stream.synchronize()
        assert isinstance(out, cupy.ndarray) and out.dtype == cupy.uint16 and lse.dtype == cupy.float32
        assert (bits(out) == bits(expected[0])).all() and (bits(lse) == bits(expected[1])).all()
    given = cupy.empty((2, 3, 4, 512), cupy.uint16), cupy.empty((2, 3, 4), cupy.float32)
    out, lse = chiasma.decode(**arrays, out=given[0], lse=given[1])
    assert out is given[0] and lse is given[1]
    cupy.cuda.runtime.deviceSynchronize()
    assert (bits(out) == bits(expected[0])).all() and (bits(lse) == bits(expected[1])).all()


def test_whatever_speaks_dlpack_can_be_an_input() -> None:
    class Wrapped:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    tensors = inputs("v32")
    expected = chiasma.decode(**tensors)
    assert_same(chiasma.decode(**(tensors | {"kv_cache": Wrapped(tensors["kv_cache"])})), expected)
    with pytest.raises(TypeError, match="q is a .*Wrapped"):
        chiasma.decode(**(tensors | {"q": Wrapped(tensors["q"])}))
