"""Wrong arguments: the right exception, a message that names the argument and what is wrong, and outputs left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chiasma
from reference import FORMATS, make_inputs, move_cache

B, S_Q, H_Q, TOPK, PAGES, PAGE = 2, 3, 4, 6, 5, 7
UNTOUCHED = 2.0**100  # no result is that large
REFUSALS = (ValueError, TypeError, NotImplementedError)


def good_arguments(fmt: str = "v32") -> dict[str, Any]:
    x = make_inputs(fmt, "cpu", b=B, s_q=S_Q, h_q=H_Q, topk=TOPK, pages=PAGES, page=PAGE)
    arguments = {
        "q": x.q,
        "kv_cache": x.cache,
        "indices": x.indices,
        "topk_length": torch.full((B,), TOPK, dtype=torch.int32),
        "attn_sink": torch.zeros(H_Q),
        "out": torch.full((B, S_Q, H_Q, 512), UNTOUCHED, dtype=torch.bfloat16),
        "lse": torch.full((B, S_Q, H_Q), UNTOUCHED),
    }
    if fmt == "v4":
        extra = make_inputs("v4", "cpu", b=B, s_q=S_Q, h_q=H_Q, topk=5, pages=2, page=3, seed=4)
        arguments |= {
            "extra_kv_cache": extra.cache,
            "extra_indices": extra.indices,
            "extra_topk_length": torch.full((B,), 5, dtype=torch.int32),
        }
    return arguments


def refused(error: type[BaseException] | tuple[type[BaseException], ...], *words: str, **arguments: Any) -> str:
    """The message of decode()'s exception. Each word, or one of several parted by "|", has to be in it."""
    outputs = {name: arguments.get(name) for name in ("out", "lse")}
    before = {name: value.clone() for name, value in outputs.items() if is_readable(value)}
    with pytest.raises(error) as caught:
        chiasma.decode(**arguments)
    message = str(caught.value)
    for word in words:
        assert any(option in message for option in word.split("|")), f"{word!r} is not in: {message}"
    for name, value in before.items():
        assert torch.equal(outputs[name], value), f"{name} was written to"
    return message


def is_readable(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    return value.untyped_storage().size() > 0


def with_last_stride_two(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


TENSORS = ["q", "kv_cache", "indices", "topk_length", "attn_sink", "out", "lse"]
EXTRA_TENSORS = ["extra_kv_cache", "extra_indices", "extra_topk_length"]
ALL_TENSORS = [*TENSORS, *EXTRA_TENSORS]


def good_for(name: str) -> dict[str, Any]:
    return good_arguments("v4" if name in EXTRA_TENSORS else "v32")


def test_the_good_arguments_are_good() -> None:
    for fmt in ("v32", "v4"):
        arguments = good_arguments(fmt)
        chiasma.decode(**arguments)
        assert not (arguments["out"] == UNTOUCHED).any() and not (arguments["lse"] == UNTOUCHED).any()


# ---- Any tensor ----


@pytest.mark.parametrize("name", ALL_TENSORS)
@given(dtype=st.sampled_from([torch.float16, torch.float64, torch.int16, torch.bool, torch.complex64]))
def test_wrong_dtype(name: str, dtype: torch.dtype) -> None:
    arguments = good_for(name)
    arguments[name] = torch.zeros(arguments[name].shape, dtype=dtype)
    refused(TypeError, name, **arguments)


@pytest.mark.parametrize("name", ALL_TENSORS)
@given(change=st.sampled_from(["longer", "shorter", "flat", "deeper"]), dim=st.integers(0, 3))
def test_wrong_shape(name: str, change: str, dim: int) -> None:
    arguments = good_for(name)
    good = arguments[name]
    shape = list(good.shape)
    dim %= len(shape)
    free = {"kv_cache": (0, 1), "extra_kv_cache": (0, 1), "indices": (2,), "extra_indices": (2,)}
    if change in ("longer", "shorter"):
        if dim in free.get(name, ()):
            return  # any number of pages, tokens in a page and entries is right
        shape[dim] += 1 if change == "longer" else -1
    else:
        shape = [good.numel()] if change == "flat" else [1, 1, 1, *shape]
        if len(shape) == good.dim():
            return
    arguments[name] = torch.zeros(shape, dtype=good.dtype)
    # A query of another shape contradicts the other tensors, any of which may be named.
    refused(ValueError, "|".join(ALL_TENSORS) if name == "q" else name, **arguments)


@pytest.mark.parametrize("name", ALL_TENSORS)
@given(value=st.sampled_from(["a string", 3, 1.5, [1, 2], {"a": 1}, object()]))
def test_not_a_tensor(name: str, value: object) -> None:
    refused(TypeError, name, **(good_for(name) | {name: value}))


@pytest.mark.parametrize("name", ["q", "kv_cache", "indices"])
def test_none_for_a_required_tensor(name: str) -> None:
    refused(TypeError, name, **(good_arguments() | {name: None}))


@pytest.mark.parametrize("name", ALL_TENSORS)
def test_device_without_memory(name: str) -> None:
    arguments = good_for(name)
    arguments[name] = arguments[name].to("meta")
    refused(ValueError, name if name != "q" else "q|kv_cache", "meta", **arguments)


@pytest.mark.parametrize("name", ALL_TENSORS)
def test_other_device(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: nothing of this was run on a GPU")
    arguments = good_for(name)
    arguments[name] = move_cache(arguments[name], "cuda")  # with its strides
    refused(ValueError, "|".join(ALL_TENSORS) if name == "q" else name, "cuda", **arguments)


@pytest.mark.parametrize("name", ALL_TENSORS)
def test_freed_storage(name: str) -> None:
    arguments = good_for(name)
    gone = arguments[name].clone(memory_format=torch.contiguous_format)
    gone.untyped_storage().resize_(0)
    refused(ValueError, name, **(arguments | {name: gone}))


@pytest.mark.parametrize("name", ["q", "kv_cache", "indices", "out", "extra_kv_cache", "extra_indices"])
def test_last_dimension_not_contiguous(name: str) -> None:
    arguments = good_for(name)
    arguments[name] = with_last_stride_two(arguments[name])
    refused(ValueError, name, "stride|contiguous", **arguments)


@pytest.mark.parametrize("name", ["q", "attn_sink", "lse", "out"])
def test_gradients_are_refused(name: str) -> None:
    arguments = good_arguments()
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"(?s){name}.*(no_grad|detach)"):
        chiasma.decode(**arguments)
    assert (arguments["out"] == UNTOUCHED).all() and (arguments["lse"] == UNTOUCHED).all()


def test_gradients_of_the_unquantised_cache_are_refused() -> None:
    x = make_inputs("bf16", "cpu", h_q=2, topk=3)
    refused(ValueError, "kv_cache", "no_grad|detach", q=x.q, kv_cache=x.cache.requires_grad_(), indices=x.indices)


# ---- The cache ----


@pytest.mark.parametrize("width", [0, 1, 512, 528, 575, 576, 655, 657, 1152])
def test_width_that_no_format_has(width: int) -> None:
    arguments = good_arguments() | {"kv_cache": torch.zeros(PAGES, PAGE, width, dtype=torch.uint8)}
    message = refused(ValueError, "kv_cache", str(width), **arguments)
    assert all(name in message for name in FORMATS)


@pytest.mark.parametrize("fmt", ["v31", "", "V32", 1, "v40"])
def test_unknown_format(fmt: Any) -> None:
    refused((ValueError, TypeError), "format", str(fmt), "v32", **(good_arguments() | {"format": fmt}))


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "v32"])
def test_format_that_is_not_the_caches(fmt: str) -> None:
    refused((ValueError, TypeError), "q|kv_cache", **(good_arguments() | {"format": fmt}))


def test_rows_of_a_page_apart() -> None:
    cache = torch.zeros(PAGES, PAGE, 672, dtype=torch.uint8)[..., :656]
    refused(ValueError, "kv_cache", "672", "656", **(good_arguments() | {"kv_cache": cache}))


def only_the_cpu_takes(cache: torch.Tensor, device: str, *words: str) -> None:
    """A cache with the values of good_arguments(), which the CPU decodes to the same bits and a GPU refuses."""
    arguments = good_arguments() | {"out": None, "lse": None}
    cache.copy_(arguments["kv_cache"])
    if device == "cuda":
        arguments = {key: value if value is None else value.to(device) for key, value in arguments.items()}
        refused(ValueError, "kv_cache", "16", *words, **(arguments | {"kv_cache": move_cache(cache, device)}))
        return
    for want, found in zip(chiasma.decode(**arguments), chiasma.decode(**(arguments | {"kv_cache": cache}))):
        assert torch.equal(want, found)


@pytest.mark.parametrize("excess", [1, 8, 15])
def test_page_stride_not_a_multiple_of_16(excess: int, device: str) -> None:
    stride = PAGE * 656 + excess
    cache = torch.zeros(PAGES * stride, dtype=torch.uint8).as_strided((PAGES, PAGE, 656), (stride, 656, 1))
    only_the_cpu_takes(cache, device, str(stride))


def test_pages_that_overlap() -> None:
    stride = 656
    cache = torch.zeros(PAGES * PAGE * 656, dtype=torch.uint8).as_strided((PAGES, PAGE, 656), (stride, 656, 1))
    refused(ValueError, "kv_cache", str(stride), **(good_arguments() | {"kv_cache": cache}))


def test_cache_at_an_odd_address(device: str) -> None:
    store = torch.zeros(PAGES * PAGE * 656 + 16, dtype=torch.uint8)
    cache = store[1 : 1 + PAGES * PAGE * 656].view(PAGES, PAGE, 656)  # of a storage at a multiple of 64
    only_the_cpu_takes(cache, device)


def test_page_of_no_tokens() -> None:
    cache = torch.zeros(PAGES, 0, 656, dtype=torch.uint8)
    refused(ValueError, "kv_cache", "0", **(good_arguments() | {"kv_cache": cache}))


def test_two_kv_heads() -> None:
    cache = torch.zeros(PAGES, PAGE, 2, 656, dtype=torch.uint8)
    refused(ValueError, "kv_cache", "page, 1, 656", **(good_arguments() | {"kv_cache": cache}))


def test_extra_cache_belongs_to_v4() -> None:
    arguments = good_arguments()
    extra = {"extra_kv_cache": arguments["kv_cache"].clone(), "extra_indices": arguments["indices"]}
    refused(ValueError, "extra_kv_cache", "v4", **(arguments | extra))


def test_extra_indices_without_extra_cache() -> None:
    arguments = good_arguments("v4")
    del arguments["extra_kv_cache"]
    refused(ValueError, "extra_indices|extra_topk_length", "extra_kv_cache", **arguments)


def test_extra_cache_without_extra_indices() -> None:
    arguments = good_arguments("v4")
    del arguments["extra_indices"]
    refused((ValueError, TypeError), "extra_indices", **arguments)


# ---- Queries, numbers and names ----


@pytest.mark.parametrize("h_q", [0, 129, 256])
def test_number_of_heads(h_q: int) -> None:
    arguments = good_arguments()
    for name in ("attn_sink", "out", "lse"):
        del arguments[name]
    arguments["q"] = torch.zeros(B, S_Q, h_q, 576, dtype=torch.bfloat16)
    refused(ValueError, "q", str(h_q), "128", **arguments)


@pytest.mark.parametrize(
    "pair",
    [
        (torch.zeros(B, S_Q, H_Q, 512, dtype=torch.bfloat16), torch.zeros(B, S_Q, H_Q, 63, dtype=torch.bfloat16)),
        (torch.zeros(B, S_Q, H_Q, 448, dtype=torch.bfloat16), torch.zeros(B, S_Q, H_Q, 64, dtype=torch.bfloat16)),
        (torch.zeros(B, S_Q, H_Q, 512, dtype=torch.bfloat16), torch.zeros(B, S_Q, 1, 64, dtype=torch.bfloat16)),
        (torch.zeros(B, S_Q, H_Q, 512, dtype=torch.bfloat16), torch.zeros(B, S_Q, H_Q, 64)),
        (torch.zeros(B, S_Q, H_Q, 512, dtype=torch.bfloat16), None),
        (torch.zeros(B, S_Q, H_Q, 512, dtype=torch.bfloat16),),
    ],
    ids=["narrow", "wide", "heads", "dtype", "none", "single"],
)
def test_pairs_that_do_not_fit(pair: Any) -> None:
    refused((ValueError, TypeError), "q", **(good_arguments() | {"q": pair}))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, -1e300])
def test_scale_that_is_no_finite_float32(scale: float) -> None:
    refused(ValueError, "sm_scale", **(good_arguments() | {"sm_scale": scale}))


@pytest.mark.parametrize("scale", ["1", [1.0], 1j])
def test_scale_that_is_no_number(scale: Any) -> None:
    refused(TypeError, "sm_scale|float", **(good_arguments() | {"sm_scale": scale}))


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, math.nan, math.inf, 1e39, 1e-50])
def test_cache_scale_that_is_no_positive_float32(scale: float) -> None:
    x = make_inputs("fp8", "cpu", h_q=2, topk=3)
    refused(ValueError, "kv_scale", q=x.q, kv_cache=x.cache, indices=x.indices, format="fp8", kv_scale=scale)


def test_cache_scale_that_is_no_number() -> None:
    refused(TypeError, "kv_scale", **(good_arguments() | {"kv_scale": "1"}))


def test_unknown_kernel() -> None:
    arguments = good_arguments() | {"kernel": "fastest"}
    message = refused((ValueError, NotImplementedError), "kernel", "fastest", **arguments)
    assert any(kernel.name in message for kernel in chiasma.kernels())


def test_unknown_keyword() -> None:
    refused(TypeError, "speed", **(good_arguments() | {"speed": 1}))


def test_kernel_of_another_device() -> None:
    others = [kernel.name for kernel in chiasma.kernels() if "cuda" in str(kernel.device).lower()]
    for name in others:
        refused((NotImplementedError, ValueError, RuntimeError), name, **(good_arguments() | {"kernel": name}))


# ---- Outputs ----


def test_outputs_that_overlap_inputs() -> None:
    arguments = good_arguments()
    shared = torch.zeros(B, S_Q, H_Q, 1088, dtype=torch.bfloat16)
    overlapping = shared.flatten()[: B * S_Q * H_Q * 512].view(B, S_Q, H_Q, 512)
    refused(ValueError, "out", "q", "overlap", **(arguments | {"q": shared[..., :576], "out": overlapping}))
    lse = arguments["attn_sink"].new_zeros(B * S_Q * H_Q)
    sinks = {"attn_sink": lse[:H_Q], "lse": lse.view(B, S_Q, H_Q)}
    refused(ValueError, "lse", "attn_sink", "overlap", **(arguments | sinks))


def test_outputs_that_overlap_each_other() -> None:
    store = torch.full((B * S_Q * H_Q * 512,), UNTOUCHED, dtype=torch.bfloat16)
    out = store.view(B, S_Q, H_Q, 512)
    lse = store[: 2 * B * S_Q * H_Q].view(torch.float32).view(B, S_Q, H_Q)
    refused(ValueError, "lse", "out", "overlap", **(good_arguments() | {"out": out, "lse": lse}))


@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_that_overlap_themselves(name: str) -> None:
    arguments = good_arguments()
    arguments[name] = arguments[name][:1].expand_as(arguments[name])
    refused(ValueError, name, "overlap", **arguments)


@pytest.mark.parametrize("missing", [1, 0])
def test_workspace_too_small(missing: int) -> None:
    """One byte less than the plan says, and one whose address is odd."""
    x = make_inputs("v32", "cpu", b=1, h_q=16, topk=4000, pages=70)
    needed = chiasma.plan(x.q, x.cache, x.indices).workspace_bytes
    if needed == 0:
        pytest.skip("this plan needs no scratch memory")
    store = torch.zeros(needed + 512, dtype=torch.uint8)
    begin = -store.data_ptr() % 256 + (0 if missing else 1)
    workspace = store[begin : begin + needed - missing]
    words = ("workspace", str(needed)) if missing else ("workspace", "256")
    refused(ValueError, *words, q=x.q, kv_cache=x.cache, indices=x.indices, workspace=workspace)


@pytest.mark.parametrize("workspace", [torch.zeros(1 << 20), "scratch", torch.zeros(1, 1 << 20, dtype=torch.uint8)])
def test_workspace_of_the_wrong_kind(workspace: Any) -> None:
    refused((ValueError, TypeError), "workspace", **(good_arguments() | {"workspace": workspace}))


# ---- Several mistakes at once, of any kind ----


def corruptions() -> st.SearchStrategy[Callable[[torch.Tensor], Any]]:
    return st.sampled_from(
        [
            lambda tensor: tensor.to("meta"),
            lambda tensor: tensor.to(torch.float16),
            lambda tensor: tensor[None],
            lambda tensor: tensor[..., :-1],
            lambda tensor: tensor.tolist(),
            lambda tensor: torch.zeros(0),
            lambda tensor: tensor.to_sparse() if tensor.dtype == torch.float32 else tensor.to(torch.float64),
        ]
    )


@settings(max_examples=150)
@given(chosen=st.dictionaries(st.sampled_from(ALL_TENSORS), corruptions(), min_size=1, max_size=4))
def test_any_corruption_is_refused(chosen: dict[str, Callable[[torch.Tensor], Any]]) -> None:
    """Never a crash and never a result; the message names an argument."""
    arguments = good_arguments("v4")
    is_still_good = True
    for name, corrupt in chosen.items():
        good = arguments[name]
        arguments[name] = bad = corrupt(good)
        # A row of fewer entries is as good as any.
        fewer = isinstance(bad, torch.Tensor) and bad.dtype == good.dtype and bad.device == good.device
        fewer = fewer and name.endswith("indices") and bad.shape[:-1] == good.shape[:-1]
        is_still_good = is_still_good and fewer
    if not is_still_good:
        refused(REFUSALS, "|".join(ALL_TENSORS), **arguments)
