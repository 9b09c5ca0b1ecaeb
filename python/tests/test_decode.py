"""chiasma.decode() against float64: random shapes and habits of callers, then small cases whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chiasma
from reference import (
    AMAX,
    DECODE_FORMATS,
    FORMATS,
    HAS_ROPE,
    INFERRED,
    KEY_DIM,
    KV_SCALE,
    NAN_CODE,
    SECOND_CACHE,
    WIDTH,
    attention,
    cache_options,
    check_result,
    key_rows,
    make_inputs,
    move_cache,
    poison,
)

Decode = Callable[..., Any]


# ---- Random cases ----


@dataclass
class Case:
    """One decode call: what it is, and in which way the caller lays out his tensors."""

    fmt: str
    b: int
    s_q: int
    h_q: int
    topk: int
    page: int
    pages: int
    scale_mode: str
    sm_scale: float | None
    masking: str  # none, minus_one, garbage or all
    duplicates: bool
    index_type: torch.dtype
    length: str  # none, request or row
    sink: str  # none, random, plus_inf or minus_inf
    pair: bool
    strided: bool
    four_dim_cache: bool
    batch_invariant: bool
    extra: bool
    seed: int


def cases(fmt: st.SearchStrategy[str]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        fmt=fmt,
        b=st.sampled_from([1, 2, 3, 0, 5]),
        s_q=st.sampled_from([1, 2, 3, 0]),
        h_q=st.one_of(st.sampled_from([1, 8, 16, 32, 64, 128]), st.integers(1, 128)),
        topk=st.one_of(st.sampled_from([0, 1, 63, 64, 65, 300]), st.integers(0, 200)),
        page=st.sampled_from([1, 61, 64, 7]),
        pages=st.integers(1, 5),
        scale_mode=st.sampled_from(["pow2", "amax"]),
        sm_scale=st.sampled_from([None, 0.0, 0.02, -0.03]),
        masking=st.sampled_from(["none", "minus_one", "garbage", "all"]),
        duplicates=st.booleans(),
        index_type=st.sampled_from([torch.int32, torch.int64]),
        length=st.sampled_from(["none", "request", "row"]),
        sink=st.sampled_from(["none", "random", "plus_inf", "minus_inf"]),
        pair=st.booleans(),
        strided=st.booleans(),
        four_dim_cache=st.booleans(),
        batch_invariant=st.booleans(),
        extra=st.booleans(),
        seed=st.integers(0, 2**20),
    )


def choose_indices(case: Case, num_slots: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    highest = max(1, num_slots // 8) if case.duplicates else num_slots
    indices = torch.randint(0, highest, shape, generator=generator)
    if case.masking != "none":
        masked = torch.rand(shape, generator=generator) < (1.0 if case.masking == "all" else 0.4)
        garbage = torch.randint(-(2**31), 2**31, shape, generator=generator)
        garbage = torch.where((garbage >= 0) & (garbage < num_slots), -1, garbage)
        if case.index_type == torch.int64:
            # Their lower halves name valid slots.
            garbage = torch.where(garbage % 2 == 0, indices + 2**32 * (1 + garbage.abs() % 1000), garbage)
        indices = torch.where(masked, garbage if case.masking == "garbage" else -1, indices)
    return indices.to(case.index_type)


def choose_length(case: Case, topk: int, generator: torch.Generator) -> torch.Tensor | None:
    if case.length == "none":
        return None
    shape = (case.b,) if case.length == "request" else (case.b, case.s_q)
    return torch.randint(-2, topk + 3, shape, generator=generator, dtype=torch.int32)


def choose_sink(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.sink == "none":
        return None
    if case.sink == "random":
        return torch.randn(case.h_q, generator=generator)
    return torch.full((case.h_q,), math.inf if case.sink == "plus_inf" else -math.inf)


def spread_out(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The same values with other strides in every dimension but the last: dimensions in another order, and gaps."""
    order = [*reversed(range(tensor.dim() - 1)), tensor.dim() - 1]
    turned = tensor.permute(order)
    store = torch.zeros(*turned.shape[:-1], turned.shape[-1] + step, dtype=tensor.dtype, device=tensor.device)
    view = store[..., : turned.shape[-1]]
    view.copy_(turned)
    inverse = [order.index(i) for i in range(tensor.dim())]
    return view.permute(inverse)


@dataclass
class Problem:
    """A case with its tensors. `call` are the arguments of chiasma.decode(), `truth` those of the reference."""

    call: dict[str, Any]
    truth: dict[str, Any]
    shape: tuple[int, int, int]


def build(case: Case, device: str) -> Problem:
    generator = torch.Generator().manual_seed(case.seed)
    scale_mode = case.scale_mode if case.fmt in AMAX else "pow2"
    gap = 2 * 576 if case.strided else 0
    x = make_inputs(
        case.fmt, "cpu", b=case.b, s_q=case.s_q, h_q=case.h_q, topk=0, pages=case.pages, page=case.page,
        seed=case.seed, scale_mode=scale_mode, extra_page_bytes=gap,
    )  # fmt: skip
    indices = choose_indices(case, x.num_slots, (case.b, case.s_q, case.topk), generator)
    truth: dict[str, Any] = {
        "sm_scale": case.sm_scale,
        "topk_length": choose_length(case, case.topk, generator),
        "attn_sink": choose_sink(case, generator),
    }
    names = {"extra_cache": "extra_kv_cache"}
    if case.extra and case.fmt in SECOND_CACHE:
        other = make_inputs(case.fmt, "cpu", b=1, topk=0, pages=3, page=5, seed=case.seed + 7)
        truth["extra_cache"] = other.cache
        truth["extra_indices"] = choose_indices(case, 15, (case.b, case.s_q, 9), generator)
        truth["extra_topk_length"] = choose_length(case, 9, generator)
    call = {}
    for name, value in truth.items():
        if isinstance(value, torch.Tensor):
            value = move_cache(value, device) if name == "extra_cache" else value.to(device)
        call[names.get(name, name)] = value
    step = 3 if device == "cpu" else 8  # elements: the GPU kernels read 16 bytes at once
    q, cache = x.q.to(device), move_cache(x.cache, device)
    if case.pair and case.fmt in HAS_ROPE:
        parts = q[..., :-64], q[..., -64:]
        q = tuple(spread_out(part, step) for part in parts) if case.strided else tuple(p.contiguous() for p in parts)
    elif case.strided:
        q = spread_out(q, step)
    call |= cache_options(case.fmt) | {
        "q": q,
        "kv_cache": cache.unsqueeze(2) if case.four_dim_cache else cache,
        "indices": spread_out(indices.to(device), 5) if case.strided else indices.to(device),
        "batch_invariant": case.batch_invariant,
    }
    return Problem(call, truth | {"q": x.q, "cache": x.cache, "indices": indices, "fmt": case.fmt}, x.q.shape[:3])


def strided_outputs(shape: tuple[int, int, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out with gaps, lse as [b, h_q, s_q] seen the other way round; both full of NaN."""
    b, s_q, h_q = shape
    out = torch.full((b, s_q + 1, h_q, 520), math.nan, dtype=torch.bfloat16, device=device)[:, :s_q, :, :512]
    lse = torch.full((b, h_q, s_q), math.nan, device=device).transpose(1, 2)
    return out, lse


def check_case(case: Case, device: str, decode_or_refuse: Decode) -> None:
    problem = build(case, device)
    given_outputs: dict[str, Any] = {}
    if case.strided:
        given_outputs = dict(zip(("out", "lse"), strided_outputs(problem.shape, device), strict=True))
    result = decode_or_refuse(case.fmt, lambda: chiasma.decode(**problem.call, **given_outputs))
    if result is None:
        return
    out, lse = result
    for name, tensor in given_outputs.items():
        returned = out if name == "out" else lse
        assert returned.data_ptr() == tensor.data_ptr() and returned.stride() == tensor.stride()
    check_result(out, lse, attention(**problem.truth), device)


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=40)
@given(data=st.data())
def test_random_cases(device: str, decode_or_refuse: Decode, fmt: str, data: st.DataObject) -> None:
    check_case(data.draw(cases(st.just(fmt))), device, decode_or_refuse)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("topk", [1, 63, 65, 2047, 2051, 2176])
def test_any_topk_is_as_the_padded_row(device: str, decode_or_refuse: Decode, fmt: str, topk: int) -> None:
    x = make_inputs(fmt, device, b=1, h_q=3, topk=topk, pages=40)
    padded = torch.nn.functional.pad(x.indices, (0, 2304 - topk), value=-1)
    result = decode_or_refuse(fmt, lambda: chiasma.decode(x.q, x.cache, padded, **x.options))
    if result is None:
        return
    out, lse = chiasma.decode(x.q, x.cache, x.indices, **x.options)
    want = attention(x.q, x.cache, x.indices, fmt)
    check_result(out, lse, want, device)
    check_result(*result, want, device)


@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_of_other_slots_do_not_matter(device: str, decode_or_refuse: Decode, fmt: str) -> None:
    """Every slot that is not selected, every gap, and all that lies behind topk_length, is NaN."""
    x = make_inputs(fmt, device, b=3, s_q=2, h_q=8, topk=100, pages=9, page=61, extra_page_bytes=1152)
    lengths = torch.tensor([100, 30, 0], dtype=torch.int32)
    mask = torch.rand(x.indices.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    x.indices[mask.to(device)] = -1
    counted = torch.arange(100) < lengths[:, None, None]
    poisoned = poison(move_cache(x.cache, "cpu"), fmt, x.indices.cpu()[counted.expand(3, 2, 100)])
    assert torch.isnan(key_rows(poisoned, fmt)).any()
    want = attention(x.q, x.cache, x.indices, fmt, topk_length=lengths)
    result = decode_or_refuse(
        fmt,
        lambda: chiasma.decode(
            x.q, move_cache(poisoned, device), x.indices, topk_length=lengths.to(device), **x.options
        ),
    )
    if result is not None:
        check_result(*result, want, device)


def test_heads_are_the_same_rows_whatever_their_number(device: str) -> None:
    x = make_inputs("v32", device, b=2, h_q=128, topk=300)
    want = attention(x.q, x.cache, x.indices, "v32")
    for h_q in (1, 8, 16, 32, 96, 128):
        out, lse = chiasma.decode(x.q[:, :, :h_q], x.cache, x.indices)
        part = attention(x.q[:, :, :h_q], x.cache, x.indices, "v32")
        assert torch.equal(part.lse, want.lse[:, :, :h_q]) or torch.allclose(part.lse, want.lse[:, :, :h_q])
        check_result(out, lse, part, device)


# ---- What a caller may give ----


def test_rank_three(device: str) -> None:
    x = make_inputs("v32", device, b=5, h_q=16, topk=70)
    expected_out, expected_lse = chiasma.decode(x.q, x.cache, x.indices)
    out, lse = chiasma.decode(x.q[:, 0], x.cache, x.indices[:, 0])
    assert out.shape == (5, 16, 512) and lse.shape == (5, 16)
    assert torch.equal(out, expected_out[:, 0]) and torch.equal(lse, expected_lse[:, 0])
    pair = (x.q[:, 0, :, :512].contiguous(), x.q[:, 0, :, 512:].contiguous())
    out, lse = chiasma.decode(pair, x.cache, x.indices[:, 0])
    assert torch.equal(out, expected_out[:, 0]) and torch.equal(lse, expected_lse[:, 0])
    lengths = torch.tensor([70, 1, 0, 33, 64], dtype=torch.int32, device=device)
    given_out, given_lse = torch.empty_like(out), torch.empty(16, 5, device=device).T
    out, lse = chiasma.decode(
        x.q[:, 0], x.cache, x.indices[:, 0], topk_length=lengths, out=given_out, lse=given_lse
    )
    assert out.data_ptr() == given_out.data_ptr() and lse.data_ptr() == given_lse.data_ptr()
    want = attention(x.q, x.cache, x.indices, "v32", topk_length=lengths)
    check_result(out[:, None], lse[:, None], want, device)


@pytest.mark.parametrize("byte_type", [torch.int8, torch.float8_e4m3fn])
def test_bytes_by_other_names(device: str, byte_type: torch.dtype) -> None:
    x = make_inputs("v32", device)
    expected = chiasma.decode(x.q, x.cache, x.indices)
    out, lse = chiasma.decode(x.q, x.cache.view(byte_type), x.indices)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_own_workspace(device: str) -> None:
    """Large enough by the plan, whatever it holds before."""
    x = make_inputs("v32", device, b=2, h_q=16, topk=2051, pages=40)
    plan = chiasma.plan(x.q, x.cache, x.indices)
    expected = chiasma.decode(x.q, x.cache, x.indices)
    for fill in (0, 255):
        store = torch.full((plan.workspace_bytes + 512,), fill, dtype=torch.uint8, device=device)
        begin = -store.data_ptr() % 256
        workspace = store[begin : begin + plan.workspace_bytes + 1]
        out, lse = chiasma.decode(x.q, x.cache, x.indices, workspace=workspace)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_plan_explains_itself(device: str) -> None:
    x = make_inputs("v32", device)
    plan = chiasma.plan(x.q, x.cache, x.indices)
    assert plan.kernel in [kernel.name for kernel in chiasma.kernels()]
    assert plan.kernel in plan.text
    assert str(plan) == plan.text
    assert plan.workspace_bytes >= 0
    out, lse = chiasma.decode(x.q, x.cache, x.indices, kernel=plan.kernel)
    expected = chiasma.decode(x.q, x.cache, x.indices)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_devices_are_listed() -> None:
    devices = chiasma.devices()
    assert len(devices) >= 1
    assert chiasma.__version__.count(".") == 2


def test_same_input_same_bits(device: str) -> None:
    x = make_inputs("v32", device, b=3, s_q=2, h_q=32, topk=1000, pages=20)
    first = chiasma.decode(x.q, x.cache, x.indices)
    for _ in range(5):
        out = torch.full_like(first[0], math.nan)
        lse = torch.full_like(first[1], math.nan)
        chiasma.decode(x.q, x.cache, x.indices, out=out, lse=lse)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


@pytest.mark.parametrize("h_q", [8, 128])
def test_batch_invariant_bits(device: str, h_q: int) -> None:
    """A request's bits are the same alone, among others, and in another place."""
    x = make_inputs("v32", device, b=7, h_q=h_q, topk=700, pages=20)
    out, lse = chiasma.decode(x.q, x.cache, x.indices, batch_invariant=True)
    check_result(out, lse, attention(x.q, x.cache, x.indices, "v32"), device)
    order = torch.tensor([3, 0, 6], device=device)
    for chosen in (order, order[:1]):
        some, some_lse = chiasma.decode(x.q[chosen], x.cache, x.indices[chosen], batch_invariant=True)
        assert torch.equal(some, out[chosen]) and torch.equal(some_lse, lse[chosen])


def test_gradients_off_is_enough(device: str) -> None:
    x = make_inputs("v32", device)
    expected, _ = chiasma.decode(x.q, x.cache, x.indices)
    with torch.no_grad():
        out, _ = chiasma.decode(x.q.clone().requires_grad_(), x.cache, x.indices)
    assert torch.equal(out, expected) and not out.requires_grad


def test_work_follows_the_current_stream() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: nothing of this was run on a GPU")
    x = make_inputs("v32", "cuda", b=4, h_q=64, topk=512, pages=20)
    expected, _ = chiasma.decode(x.q, x.cache, x.indices)
    q = torch.zeros_like(x.q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(x.q)
        out, _ = chiasma.decode(q, x.cache, x.indices)
    stream.synchronize()
    assert torch.equal(out, expected)


# ---- Small cases with exact answers ----


def one_page(codes: int, scales: list[float], device: str) -> torch.Tensor:
    """A page of 64 v32 slots, all NaN but slot 5: this code throughout, these four scales, RoPE 0."""
    cache = torch.full((1, 64, 656), NAN_CODE, dtype=torch.uint8)
    cache[0, 5, :512] = codes
    cache[0, 5, 512:528] = torch.tensor(scales).view(torch.uint8)
    cache[0, 5, 528:] = 0
    return cache.to(device)


def small_call(cache: torch.Tensor, entries: list[int], topk: int = 64, **options: Any) -> tuple[Any, Any]:
    device = cache.device
    q = torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16, device=device)
    indices = torch.full((1, 1, topk), -1, dtype=torch.int32)
    indices[0, 0, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
    out, lse = chiasma.decode(q, cache, indices.to(device), sm_scale=1.0, **options)
    return out[0, 0].float().cpu(), lse[0, 0].cpu()


def test_scales_are_used_as_stored(device: str) -> None:
    # 1.5 times each; none lies half-way between two bf16 numbers, where a device may round either way.
    out, lse = small_call(one_page(0x3C, [1.75, 0.3, 1 + 2.0**-8, 2.0**-13], device), [5])
    for block, value in enumerate([2.625, 0.44921875, 1.5078125, 1.5 * 2.0**-13]):
        assert (out[:, block * 128 : (block + 1) * 128] == value).all()
    assert (lse == 0).all()


def test_scale_is_not_rounded_to_bf16(device: str) -> None:
    out, _ = small_call(one_page(0x7E, [1.00390625] * 4, device), [5])
    assert (out == 450).all()


def test_valid_entry_behind_a_masked_block(device: str) -> None:
    out, lse = small_call(one_page(0x38, [1.75] * 4, device), [-1] * 64 + [5], topk=128)
    assert (out == 1.75).all() and (lse == 0).all()


def test_duplicate_counts_twice(device: str) -> None:
    out, lse = small_call(one_page(0x38, [1.75] * 4, device), [5, 5])
    assert (out == 1.75).all()
    torch.testing.assert_close(lse, torch.full((64,), math.log(2)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_equal_scores_give_the_mean(device: str, n: int) -> None:
    cache = one_page(0x38, [1.0] * 4, "cpu")
    cache[0, :n] = cache[0, 5].clone()
    for slot in range(n):
        cache[0, slot, 512:528] = torch.full((4,), float(slot + 1)).view(torch.uint8)
    out, lse = small_call(cache.to(device), list(range(n)))
    assert (out == torch.tensor((n + 1) / 2).bfloat16().float()).all()
    torch.testing.assert_close(lse, torch.full((64,), math.log(n)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("sink", "factor"), [(0.0, 0.5), (math.inf, 0.0), (-math.inf, 1.0)])
def test_sinks(device: str, sink: float, factor: float) -> None:
    sinks = torch.full((64,), sink, device=device)
    out, lse = small_call(one_page(0x38, [1.75] * 4, device), [5], attn_sink=sinks)
    assert (out == 1.75 * factor).all() and (lse == 0).all()
    out, lse = small_call(one_page(0x38, [1.75] * 4, device), [], attn_sink=sinks)
    assert (out == 0).all() and torch.isneginf(lse).all()


@pytest.mark.parametrize("entries", [[], [-1], [64], [2**31 - 1], [-(2**31)]])
def test_nothing_selected(device: str, entries: list[int]) -> None:
    out, lse = small_call(one_page(0x38, [1.0] * 4, device), entries)
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_a_cache_without_pages(device: str) -> None:
    out, lse = small_call(torch.empty(0, 64, 656, dtype=torch.uint8, device=device), [0, 5])
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_nan_in_a_selected_row_counts(device: str) -> None:
    out, lse = small_call(one_page(0x38, [1.0] * 4, device), [5, 6])
    assert torch.isnan(out).all() and torch.isnan(lse).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_are_inferred_or_named(device: str, decode_or_refuse: Decode, fmt: str) -> None:
    """By dtype and width where only one format comes into question, and never otherwise."""
    x = make_inputs(fmt, device, h_q=4, topk=5)
    options = cache_options(fmt) | {"format": fmt}
    named = decode_or_refuse(fmt, lambda: chiasma.decode(x.q, x.cache, x.indices, **options))
    if fmt in INFERRED:
        if named is not None:
            assert torch.equal(chiasma.decode(x.q, x.cache, x.indices)[0], named[0])
        return
    for call in (chiasma.decode, chiasma.plan):
        with pytest.raises(ValueError) as caught:
            call(x.q, x.cache, x.indices)
        # v32nope's rows are v32's, whose queries are wider.
        words = ("q", "576") if fmt == "v32nope" else ("kv_cache", str(WIDTH[fmt]), f"{fmt!r}", *FORMATS)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("fmt", FORMATS)
def test_default_scale_is_the_formats(device: str, decode_or_refuse: Decode, fmt: str) -> None:
    x = make_inputs(fmt, device, h_q=4)
    plain = decode_or_refuse(fmt, lambda: chiasma.decode(x.q, x.cache, x.indices, **x.options))
    if plain is not None:
        given_scale = chiasma.decode(x.q, x.cache, x.indices, sm_scale=KEY_DIM[fmt] ** -0.5, **x.options)
        assert torch.equal(plain[0], given_scale[0]) and torch.equal(plain[1], given_scale[1])


@pytest.mark.parametrize("fmt", ["fp8", "fp8nope"])
def test_kv_scale_is_no_part_of_a_plan(device: str, fmt: str) -> None:
    """Calls of one shape share their plan, and each has the scale that it was given; None is 1."""
    x = make_inputs(fmt, device, h_q=4)
    for kv_scale in (KV_SCALE, None, 1.0, 2.5, KV_SCALE):
        out, lse = chiasma.decode(x.q, x.cache, x.indices, format=fmt, kv_scale=kv_scale)
        check_result(out, lse, attention(x.q, x.cache, x.indices, fmt, kv_scale=kv_scale), device)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt not in HAS_ROPE])
def test_no_pair_without_rotary_columns(device: str, fmt: str) -> None:
    x = make_inputs(fmt, device, h_q=4)
    for width in (448, 512):
        pair = x.q[..., :width], x.q[..., :64]
        with pytest.raises(ValueError, match="q"):
            chiasma.decode(pair, x.cache, x.indices, **x.options)
    with pytest.raises(ValueError, match=f"q_rope is given with format {fmt}"):
        chiasma.decode((x.q[..., :448], x.q[..., 448:]), x.cache, x.indices, **x.options)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if not fmt.startswith("fp8")])
def test_kv_scale_belongs_to_fp8(fmt: str) -> None:
    x = make_inputs(fmt, "cpu", h_q=4)
    with pytest.raises(ValueError, match=f"kv_scale is 0.5; format {fmt} "):
        chiasma.decode(x.q, x.cache, x.indices, format=fmt, kv_scale=0.5)
