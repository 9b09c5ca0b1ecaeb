"""Cache operations against the formulas of docs/kv_format.md in PyTorch, byte by byte where bytes are stored."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import chiasma
from reference import (
    AMAX,
    FORMATS,
    HAS_ROPE,
    KEY_DIM,
    LAYOUTS,
    NAN_CODE,
    WIDTH,
    cache_options,
    key_rows,
    kv_scale_of,
    make_cache,
    move_cache,
    page_bytes,
    page_parts,
    quantize,
)

WRITTEN = [*((fmt, "pow2") for fmt in FORMATS), *((fmt, "amax") for fmt in AMAX)]


def random_kv(fmt: str, pages: int, page: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(pages, page, KEY_DIM[fmt], generator=generator)
    kv *= 10.0 ** torch.empty(pages, page, 1).uniform_(-3, 3, generator=generator)
    kv[torch.rand(kv.shape, generator=generator) < 0.05] = 0.0
    kv[0, 0, :200] = 0.0  # a tile of zeros, and part of another
    return kv.bfloat16()


def stored_bytes(cache: torch.Tensor, fmt: str) -> list[torch.Tensor]:
    """The bytes that mean something: rows, without those that v32nope reserves, and scales behind them."""
    cache = cache.cpu()
    if cache.dtype == torch.bfloat16:
        return [cache.contiguous().view(torch.uint8)]
    rows, groups = page_parts(cache, fmt)
    return [rows[..., :528] if fmt == "v32nope" else rows, groups]


def same_bytes(a: torch.Tensor, b: torch.Tensor, fmt: str) -> bool:
    return all(torch.equal(x, y) for x, y in zip(stored_bytes(a, fmt), stored_bytes(b, fmt), strict=True))


def test_formats_are_the_librarys() -> None:
    """What the tests know of formats, and what the package asks the library."""
    from chiasma import _formats, _native

    assert list(_formats.NUMBERS) == FORMATS
    for fmt, number in _formats.NUMBERS.items():
        assert (_formats.KEY_DIMS[number], _formats.WIDTHS[number]) == (KEY_DIM[fmt], WIDTH[fmt])
        for page in (1, 7, 61, 64, 1152):
            assert _native.page_bytes(number, page) == page_bytes(fmt, page)
            if _formats.CACHE_DTYPES[number] == "uint8":  # the fake operators' rule
                multiple = _formats.PAGE_MULTIPLES.get(number, 1)
                assert -(-page * WIDTH[fmt] // multiple) * multiple == page_bytes(fmt, page)


# ---- Quantise and dequantise ----


@pytest.mark.parametrize(("fmt", "scale"), WRITTEN)
@given(pages=st.integers(1, 4), page=st.sampled_from([1, 7, 61, 64]), seed=st.integers(0, 2**20))
def test_quantized_bytes(device: str, fmt: str, scale: str, pages: int, page: int, seed: int) -> None:
    kv = random_kv(fmt, pages, page, seed)
    cache = chiasma.quantize(kv.to(device), format=fmt, scale=scale, kv_scale=kv_scale_of(fmt))
    assert cache.shape == (pages, page, WIDTH[fmt])
    assert cache.dtype == (torch.uint8 if LAYOUTS[fmt].codes else torch.bfloat16)
    assert cache.device.type == device
    if pages > 1:
        assert cache.stride(0) * cache.element_size() == page_bytes(fmt, page)
    assert same_bytes(cache, quantize(kv, fmt, scale), fmt)


@pytest.mark.parametrize(("fmt", "scale"), WRITTEN)
def test_quantize_into_a_given_cache(device: str, fmt: str, scale: str) -> None:
    kv = random_kv(fmt, 3, 7, 5)
    given_cache = move_cache(make_cache(fmt, 3, 7, seed=1, extra_page_bytes=160), device)
    expected = quantize(kv, fmt, scale, out=move_cache(given_cache, "cpu"))
    result = chiasma.quantize(kv.to(device), format=fmt, scale=scale, kv_scale=kv_scale_of(fmt), out=given_cache)
    assert result.data_ptr() == given_cache.data_ptr()
    assert same_bytes(given_cache, expected, fmt)
    gap = given_cache.as_strided((2, 80), (given_cache.stride(0), 1), given_cache.stride(0) - 80).cpu()
    assert (torch.isnan(gap) if gap.dtype == torch.bfloat16 else gap == NAN_CODE).all()


@pytest.mark.parametrize(
    ("value", "scale", "stored_scale", "code", "back"),
    [
        (336.0, "amax", 0.75, 0x7E, 336.0),
        (336.0, "pow2", 1.0, 0x7A, 320.0),
        (1e-6, "pow2", 2.0**-13, 0x04, None),
        (450.0, "pow2", 2.0, 0x76, 448.0),
        (0.0, "pow2", 2.0**-13, 0x00, 0.0),
        (-0.0, "amax", None, 0x00, 0.0),
    ],
)
def test_exact_tiles(
    device: str, value: float, scale: str, stored_scale: float | None, code: int, back: float | None
) -> None:
    kv = torch.full((1, 1, 576), value).bfloat16()
    cache = chiasma.quantize(kv.to(device), scale=scale)
    assert (cache[0, 0, :512].cpu() == code).all()
    scales = cache[0, 0, 512:528].cpu().view(torch.float32)
    assert (scales > 0).all() and torch.isfinite(scales).all()
    if stored_scale is not None:
        assert (scales == stored_scale).all()
    if back is not None:
        assert (chiasma.dequantize(cache)[..., :512] == back).all()


@pytest.mark.parametrize(("fmt", "scale"), WRITTEN)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_dequantize(device: str, fmt: str, scale: str, dtype: torch.dtype | None) -> None:
    cache = make_cache(fmt, 3, 61, seed=2, scale_mode=scale, extra_page_bytes=160)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    options |= cache_options(fmt)
    kv = chiasma.dequantize(move_cache(cache, device), **options)
    assert kv.shape == (3, 61, KEY_DIM[fmt]) and kv.dtype == (dtype or torch.float32)
    expected = key_rows(cache, fmt).float().to(kv.dtype).view(kv.shape)
    assert torch.equal(kv.cpu(), expected)
    out = torch.zeros(3, 61, KEY_DIM[fmt] + 8, dtype=kv.dtype, device=device)[..., : KEY_DIM[fmt]]
    again = chiasma.dequantize(move_cache(cache, device), **cache_options(fmt), out=out)
    assert again.data_ptr() == out.data_ptr() and torch.equal(out, kv)


def test_every_code_and_an_empty_cache(device: str) -> None:
    cache = torch.zeros(1, 1, 656, dtype=torch.uint8)
    cache[0, 0, :512] = torch.arange(512) % 256
    cache[0, 0, 512:528] = torch.tensor([1.0, 3.7e-3, -2.0, 1e30]).view(torch.uint8)
    expected = key_rows(cache, "v32").float()
    torch.testing.assert_close(
        chiasma.dequantize(cache.to(device)).cpu()[0], expected, rtol=0, atol=0, equal_nan=True
    )
    assert chiasma.dequantize(cache.to(device)[:0]).shape == (0, 1, 576)


# ---- Append ----


@pytest.mark.parametrize(("fmt", "scale"), WRITTEN)
@given(tokens=st.integers(0, 40), seed=st.integers(0, 2**20), strided=st.booleans())
def test_append(device: str, fmt: str, scale: str, tokens: int, seed: int, strided: bool) -> None:
    """Rows land in their slots as quantize() would store them; -1 and slots outside are skipped; all else stays.
    Formats without rotary columns take rows in one piece, the others in either way."""
    pages, page = 4, 13
    is_pair = fmt in HAS_ROPE and seed % 3 > 0
    random_rows = random_kv(fmt, 1, tokens + 1, seed)[0]
    rows = random_rows[:tokens]
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * page, generator=generator)[:tokens]
    skipped = torch.rand(tokens, generator=generator) < 0.3
    outside = torch.tensor([-1, pages * page, 2**40, -(2**40)])[torch.arange(tokens) % 4]
    slots = torch.where(skipped, outside, slots)
    before = make_cache(fmt, pages, page, seed=seed, scale_mode=scale)
    expected = key_rows(before, fmt)
    stored = key_rows(quantize(random_rows[None], fmt, scale), fmt)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < pages * page:
            expected[slot] = stored[token]
    cache = move_cache(before, device)
    parts = [rows[:, :-64], rows[:, -64:]] if is_pair else [rows]
    parts = [part.to(device) if strided else part.contiguous().to(device) for part in parts]
    kv_c, k_pe = parts if is_pair else (parts[0], None)
    count, out_of_cache = torch.full((2, 1), 99, dtype=torch.int64, device=device)
    result = chiasma.quantize_and_append(
        kv_c, k_pe, cache, slots.to(device), format=fmt, scale=scale, kv_scale=kv_scale_of(fmt), nonfinite_count=count,
        skipped_count=out_of_cache,
    )  # fmt: skip
    assert result is None and count.item() == 0
    assert out_of_cache.item() == ((slots != -1) & ((slots < 0) | (slots >= pages * page))).sum()
    assert torch.equal(key_rows(cache, fmt), expected)


def test_nonfinite_values_stay_in_their_tile(device: str) -> None:
    rows = random_kv("v32", 1, 3, 1)[0]
    rows[1, 130], rows[1, 140], rows[1, 150] = math.nan, math.inf, -math.inf
    rows[2, 600 - 64] = math.inf  # a rotary number: copied, and counted
    finite = torch.where(torch.isfinite(rows), rows, torch.zeros_like(rows))
    expected = key_rows(quantize(finite[None], "v32"), "v32")
    cache = torch.zeros(1, 4, 656, dtype=torch.uint8, device=device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    slots = torch.arange(3, device=device)
    chiasma.quantize_and_append(
        rows[:, :512].to(device), rows[:, 512:].to(device), cache, slots, nonfinite_count=count
    )
    assert count.item() == 4
    values = key_rows(cache, "v32")[:3]
    assert torch.isnan(values[1, [130, 140, 150]]).all() and values[2, 536] == math.inf
    assert (cache[0, 1, [130, 140, 150]].cpu() == NAN_CODE).all()
    usual = torch.isfinite(rows)
    assert torch.equal(values[usual], expected[usual])
    chiasma.quantize_and_append(
        rows[:, :512].to(device), rows[:, 512:].to(device), cache, torch.full_like(slots, -1), nonfinite_count=count
    )
    assert count.item() == 0  # nothing was stored


def test_appended_rows_are_decoded(device: str) -> None:
    """The loop of a server in small: append, then attend to the appended token alone."""
    cache = torch.zeros(2, 64, 656, dtype=torch.uint8, device=device)
    q = torch.zeros(1, 1, 4, 576, dtype=torch.bfloat16, device=device)
    for slot in (0, 64, 127):
        row = torch.full((1, 512), float(slot + 1), dtype=torch.bfloat16, device=device)
        k_pe = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
        chiasma.quantize_and_append(row, k_pe, cache, torch.tensor([slot], device=device))
        out, _ = chiasma.decode(q, cache, torch.tensor([[[slot]]], dtype=torch.int32, device=device))
        assert (out == chiasma.dequantize(cache)[slot // 64, slot % 64, :512].bfloat16()).all()


# ---- Gather ----


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_gather_slots(device: str, fmt: str, dtype: torch.dtype | None, slot_type: torch.dtype) -> None:
    cache = make_cache(fmt, 3, 61, seed=3, extra_page_bytes=1152)
    slots = torch.tensor([5, 182, 5, -1, 0, 183, 2**31 - 1, -(2**31), 60, 61], dtype=slot_type)
    if slot_type == torch.int64:
        slots[3] = 2**32 + 5
    options: dict[str, Any] = cache_options(fmt) | ({} if dtype is None else {"dtype": dtype})
    kv = chiasma.gather_dequantize(move_cache(cache, device), slots.to(device), **options)
    assert kv.shape == (10, KEY_DIM[fmt]) and kv.dtype == (dtype or torch.bfloat16)
    rows = key_rows(cache, fmt)
    valid = (slots >= 0) & (slots < len(rows))
    expected = torch.where(valid[:, None], rows[slots.long().where(valid, 0)], 0.0).float().to(kv.dtype)
    assert torch.equal(kv.cpu(), expected)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("start_type", [torch.int32, torch.int64])
def test_gather_requests(device: str, fmt: str, start_type: torch.dtype) -> None:
    """Requests of several lengths, one longer than its pages, pages outside the cache, rows that nobody writes."""
    page = 7
    cache = make_cache(fmt, 6, page, seed=4)
    block_table = torch.tensor([[3, 1, -1], [0, 5, 2], [9, 4, 4]], dtype=torch.int32)
    seq_lens = torch.tensor([16, 999, 0], dtype=torch.int32)
    starts = torch.tensor([2, 20, 50], dtype=start_type)
    rows = key_rows(cache, fmt)
    expected = torch.full((60, KEY_DIM[fmt]), 7.0)
    for request, length in enumerate([16, 21, 0]):
        for token in range(length):
            slot = int(block_table[request, token // page]) * page + token % page
            row = rows[slot] if 0 <= slot < len(rows) else torch.zeros(KEY_DIM[fmt])
            expected[int(starts[request]) + token] = row.float()
    out = torch.full((60, KEY_DIM[fmt]), 7.0, dtype=torch.bfloat16, device=device)
    arguments = {"block_table": block_table, "seq_lens": seq_lens, "starts": starts}
    result = chiasma.gather_dequantize(
        move_cache(cache, device), **{name: value.to(device) for name, value in arguments.items()}, out=out,
        **cache_options(fmt),
    )  # fmt: skip
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out.cpu(), expected.bfloat16())
    fresh = chiasma.gather_dequantize(
        move_cache(cache, device), **{name: value.to(device) for name, value in arguments.items()}, rows=60,
        **cache_options(fmt),
    )  # fmt: skip
    assert fresh.shape == (60, KEY_DIM[fmt])
    assert torch.equal(fresh.cpu()[2:18], expected[2:18].bfloat16())


# ---- Index translation ----


def translate(
    tokens: torch.Tensor, table: torch.Tensor, request: torch.Tensor, page: int, world: int, rank: int, run: int
) -> torch.Tensor:
    """The rule of chiasma_translate_indices() for one token after the other."""
    slots = torch.full(tokens.shape, -1, dtype=torch.int64)
    for place in itertools.product(*(range(n) for n in tokens.shape)):
        token, row = int(tokens[place]), int(request[place[0]])
        if token < 0 or not 0 <= row < len(table) or (token // run) % world != rank:
            continue
        local = token // (world * run) * run + token % run
        if local // page >= table.shape[1] or int(table[row, local // page]) < 0:
            continue
        slot = int(table[row, local // page]) * page + local % page
        if slot < 2**31:
            slots[place] = slot
    return slots.to(torch.int32)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 20)),
    page=st.sampled_from([1, 7, 64, 2**20]),
    world=st.sampled_from([1, 2, 3, 8]),
    run=st.sampled_from([1, 4, 64]),
    index_type=st.sampled_from([torch.int32, torch.int64]),
    with_request=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_translate(
    device: str,
    shape: tuple[int, int, int],
    page: int,
    world: int,
    run: int,
    index_type: torch.dtype,
    with_request: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank = seed % world
    requests = 4 if with_request else shape[0]
    table = torch.randint(-1, 5000, (requests, 5), generator=generator, dtype=torch.int32)
    tokens = torch.randint(-3, min(page * 6 * world, 2**31 - 1), shape, generator=generator)
    if index_type == torch.int64:
        tokens[0, 0, :2] = torch.tensor([2**33, -(2**40)])
    tokens = tokens.to(index_type)
    request = torch.randint(-1, 6, (shape[0],), generator=generator, dtype=torch.int32)
    options: dict[str, Any] = {"request": request.to(device)} if with_request else {}
    slots = chiasma.translate_indices(
        tokens.to(device), table.to(device), page=page, cp_world=world, cp_rank=rank, cp_interleave=run, **options
    )
    assert slots.dtype == torch.int32
    rows = request if with_request else torch.arange(shape[0])
    assert torch.equal(slots.cpu(), translate(tokens, table, rows, page, world, rank, run))


def test_translate_rank_two_and_in_place(device: str) -> None:
    tokens = torch.tensor([[0, 8, -1], [15, 16, 7]], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 2], [1, 0]], dtype=torch.int32, device=device)
    expected = torch.tensor([[32, 16, -1], [7, -1, 15]], dtype=torch.int32)
    assert torch.equal(chiasma.translate_indices(tokens, table, page=8).cpu(), expected)
    result = chiasma.translate_indices(tokens, table, page=8, out=tokens)
    assert result.data_ptr() == tokens.data_ptr() and torch.equal(tokens.cpu(), expected)


# ---- Merge ----


def merged(part_out: torch.Tensor, part_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    part_out, part_lse = part_out.double().cpu(), part_lse.double().cpu()
    lse = torch.logsumexp(part_lse, 0)
    weights = torch.exp(part_lse - lse.where(torch.isfinite(lse), 0.0))
    weights = torch.where(torch.isneginf(part_lse), 0.0, weights)
    values = torch.where(torch.isneginf(part_lse)[..., None], 0.0, part_out)
    return (weights[..., None] * values).sum(0), lse


@given(
    parts=st.integers(1, 5),
    shape=st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 9)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    as_sequence=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_merge(
    device: str, parts: int, shape: tuple[int, int, int], dtype: torch.dtype, as_sequence: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    part_out = torch.randn(parts, *shape, 512, generator=generator).to(dtype)
    part_lse = 20 * torch.randn(parts, *shape, generator=generator)
    empty = torch.rand(part_lse.shape, generator=generator) < 0.3
    part_lse[empty] = -math.inf
    part_out[empty] = math.nan  # an empty part may hold anything
    given_out, given_lse = part_out.to(device), part_lse.to(device)
    if as_sequence:
        out, lse = chiasma.merge(list(given_out), list(given_lse))
    else:
        out, lse = chiasma.merge(given_out, given_lse)
    want_out, want_lse = merged(part_out, part_lse)
    assert out.shape == want_out.shape and lse.shape == want_lse.shape and lse.dtype == torch.float32
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-6, atol=1e-6)
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.cpu().double(), want_out, rtol=rounding, atol=1e-6)
    assert (out[torch.isneginf(lse)] == 0).all()


def test_merge_of_parts_that_flash_mla_left_empty(device: str) -> None:
    part_out = torch.stack([torch.full((1, 2, 512), value) for value in (3.0, 5.0)]).to(device)
    part_lse = torch.tensor([[[math.inf, math.inf]], [[0.25, math.inf]]], device=device)
    out, lse = chiasma.merge(part_out, part_lse, plus_infinity_is_empty=True)
    assert (out[0, 0] == 5).all() and (out[0, 1] == 0).all() and lse.tolist() == [[0.25, -math.inf]]
    out, lse = chiasma.merge(part_out, part_lse)
    assert out.isnan().all() and lse.isnan().all()


def test_merge_of_two_known_parts(device: str) -> None:
    part_out = torch.stack([torch.zeros(1, 1, 512), torch.full((1, 1, 512), 10.0)]).to(device)
    part_lse = torch.tensor([2.0, 8.0]).log().view(2, 1, 1).to(device)
    out, lse = chiasma.merge(part_out, part_lse)  # rank one lower
    torch.testing.assert_close(out.float().cpu(), torch.full((1, 1, 512), 8.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 1), math.log(10)), rtol=1e-6, atol=0)


def test_parts_of_a_row_merge_to_the_whole(device: str) -> None:
    """Context parallelism: what two ranks decode of one row, merged, is what one decodes."""
    cache = move_cache(make_cache("v32", 4, 64), device)
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(3, 1, 16, 576, generator=generator).bfloat16().to(device)
    indices = torch.randint(0, 256, (3, 1, 100), generator=generator, dtype=torch.int32).to(device)
    mine = torch.rand(indices.shape, generator=generator).to(device) < 0.5
    mine[2] = True  # the other rank has nothing
    parts = [chiasma.decode(q, cache, indices.where(chosen, -1)) for chosen in (mine, ~mine)]
    out, lse = chiasma.merge([part[0] for part in parts], [part[1] for part in parts])
    want_out, want_lse = chiasma.decode(q, cache, indices)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    difference = (out.float() - want_out.float()).norm(dim=-1) / want_out.float().norm(dim=-1)
    assert (difference < 6e-3).all()  # two parts and a sum, each rounded to bf16
    assert torch.equal(lse[2], parts[0][1][2]) and torch.equal(out[2].float(), parts[0][0][2].float())


# ---- Wrong arguments ----


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("quantize", {"kv": torch.zeros(1, 2, 575, dtype=torch.bfloat16)}, ["kv", "575"]),
        ("quantize", {"kv": torch.zeros(1, 2, 576)}, ["kv", "float32"]),
        ("quantize", {"kv": torch.zeros(1, 2, 576, dtype=torch.bfloat16), "scale": "max"}, ["scale", "max"]),
        ("quantize", {"kv": torch.zeros(1, 2, 576, dtype=torch.bfloat16), "format": "v5"}, ["format", "v5"]),
        (
            "quantize",
            {"kv": torch.zeros(1, 2, 512, dtype=torch.bfloat16), "format": "v4", "scale": "amax"},
            ["scale", "pow2"],
        ),
        (
            "quantize",
            {"kv": torch.zeros(1, 2, 512, dtype=torch.bfloat16), "format": "v41", "scale": "amax"},
            ["scale", "pow2"],
        ),
        ("quantize", {"kv": torch.zeros(1, 2, 576, dtype=torch.bfloat16), "kv_scale": 0.5}, ["kv_scale", "v32"]),
        (
            "quantize",
            {"kv": torch.zeros(1, 2, 576, dtype=torch.bfloat16), "format": "fp8", "kv_scale": -1.0},
            ["kv_scale", "-1"],
        ),
        ("quantize", {"kv": torch.zeros(1, 2, 576, dtype=torch.bfloat16), "format": None}, ["format"]),
        ("dequantize", {"kv_cache": torch.zeros(1, 2, 528, dtype=torch.uint8)}, ["kv_cache", "528", "v32nope_compact"]),
        ("dequantize", {"kv_cache": torch.zeros(1, 2, 576, dtype=torch.uint8)}, ["kv_cache", "format='fp8'"]),
        (
            "dequantize",
            {"kv_cache": torch.zeros(1, 2, 576, dtype=torch.uint8), "format": "fp8", "kv_scale": 0.0},
            ["kv_scale", "> 0"],
        ),
        (
            "quantize_and_append",
            {
                "kv_c": torch.zeros(2, 448, dtype=torch.bfloat16),
                "k_pe": torch.zeros(2, 64, dtype=torch.bfloat16),
                "kv_cache": torch.zeros(1, 2, 656, dtype=torch.uint8),
                "slot_mapping": torch.zeros(2, dtype=torch.int64),
                "format": "v32nope",
            },
            ["rope|k_pe", "v32nope"],
        ),
        (
            "dequantize",
            {"kv_cache": torch.zeros(1, 2, 656, dtype=torch.uint8), "out": torch.zeros(1, 3, 576)},
            ["kv|out", "3"],
        ),
        (
            "gather_dequantize",
            {"kv_cache": torch.zeros(1, 2, 656, dtype=torch.uint8)},
            ["slots", "block_table"],
        ),
        (
            "quantize_and_append",
            {
                "kv_c": torch.zeros(2, 512, dtype=torch.bfloat16),
                "k_pe": torch.zeros(2, 64, dtype=torch.bfloat16),
                "kv_cache": torch.zeros(1, 2, 656, dtype=torch.uint8),
                "slot_mapping": torch.zeros(3, dtype=torch.int64),
            },
            ["slot_mapping", "3"],
        ),
        (
            "translate_indices",
            {
                "indices": torch.zeros(1, 2, dtype=torch.int32),
                "block_table": torch.zeros(1, 2, dtype=torch.int32),
                "page": 0,
            },
            ["page", "0"],
        ),
        (
            "translate_indices",
            {
                "indices": torch.zeros(1, 2, dtype=torch.int32),
                "block_table": torch.zeros(1, 2, dtype=torch.int32),
                "page": 4,
                "cp_world": 2,
                "cp_rank": 2,
            },
            ["cp_rank", "2"],
        ),
        ("merge", {"part_out": torch.zeros(2, 1, 1, 3, 511), "part_lse": torch.zeros(2, 1, 1, 3)}, ["part_out", "511"]),
        ("merge", {"part_out": torch.zeros(2, 1, 1, 3, 512), "part_lse": torch.zeros(2, 1, 1, 4)}, ["part_lse", "4"]),
        ("merge", {"part_out": torch.zeros(0, 1, 1, 3, 512), "part_lse": torch.zeros(0, 1, 1, 3)}, ["part_out", "0"]),
    ],
)  # fmt: skip
def test_wrong_arguments(function: str, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(chiasma, function)(**arguments)
    for word in words:
        assert any(option in str(caught.value) for option in word.split("|")), (word, str(caught.value))
