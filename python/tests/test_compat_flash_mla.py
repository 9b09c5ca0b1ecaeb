"""chiasma.compat.flash_mla, called as the engines call flash_mla: their shapes, their keywords, their habits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chiasma.compat import flash_mla as compat
from reference import Inputs, attention, check_result, make_cache, make_inputs, move_cache, page_bytes

Decode = Callable[..., Any]


def check(out: torch.Tensor, lse: torch.Tensor, x: Inputs, **options: Any) -> None:
    """What flash_mla_with_kvcache returned, against float64; +inf is its word for an empty row."""
    b, s_q, h_q, _ = x.q.shape
    assert out.shape == (b, s_q, h_q, 512)
    assert lse.shape == (b, h_q, s_q)
    assert not torch.isneginf(lse).any()
    natural = torch.where(torch.isposinf(lse), -math.inf, lse).transpose(1, 2)
    want = attention(x.q, x.cache, x.indices, x.fmt, **options)
    assert (torch.isposinf(lse.transpose(1, 2)).cpu() == torch.isneginf(want.lse)).all()
    check_result(out, natural, want, x.q.device.type)


def call(x: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A call as vLLM makes it; the engine's own keywords come in options."""
    cache = x.cache if x.cache.dim() == 4 else x.cache.unsqueeze(-2)
    keywords: dict[str, Any] = {
        "block_table": None,
        "head_dim_v": 512,
        "cache_seqlens": None,
        "tile_scheduler_metadata": compat.FlashMLASchedMeta(),
        "is_fp8_kvcache": True,
        "indices": x.indices,
        "softmax_scale": x.q.shape[-1] ** -0.5,
    }
    return compat.flash_mla_with_kvcache(q=x.q, k_cache=cache, **(keywords | options))


# ---- vLLM ----


@pytest.mark.parametrize("num_heads", [8, 16])
def test_vllm_fewer_than_32_heads(device: str, num_heads: int) -> None:
    """All tokens as one request of T, queries padded with zero heads to 64, dummies for the tables."""
    x = make_inputs("v32", device, b=1, s_q=7, h_q=64, topk=128)
    x.q[:, :, num_heads:] = 0
    x.indices[0, 2, 5:] = -1
    dummies = {
        "block_table": torch.zeros(1, 1, dtype=torch.int32, device=device),
        "cache_seqlens": torch.full((1,), 4096, dtype=torch.int32, device=device),
    }
    out, lse = call(x, **dummies)
    check(out, lse, x)


def test_vllm_thousands_of_tokens_in_one_request(device: str) -> None:
    x = make_inputs("v32", device, b=1, s_q=3000, h_q=1, topk=8)
    out, lse = call(x)
    check(out, lse, x)


@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("next_n", [1, 3])
def test_vllm_decodes_with_speculation(device: str, num_heads: int, next_n: int) -> None:
    x = make_inputs("v32", device, b=3, s_q=next_n, h_q=num_heads, topk=64)
    out, lse = call(x, block_table=torch.zeros(3, 9, dtype=torch.int32, device=device))
    check(out, lse, x)


def test_vllm_context_parallel_scatters_minus_one(device: str) -> None:
    x = make_inputs("v32", device, b=4, h_q=64, topk=256)
    masked = torch.rand(x.indices.shape, generator=torch.Generator().manual_seed(3)) < 0.75
    x.indices[masked.to(device)] = -1
    x.indices[3] = -1  # this rank has nothing of that request
    out, lse = call(x)
    check(out, lse, x)
    assert torch.isposinf(lse[3]).all()
    assert (out[3] == 0).all()


def test_vllm_interleaved_layers(device: str) -> None:
    """Pages of several layers in one allocation: the next page of a layer is further away than a page is long."""
    x = make_inputs("v32", device, b=2, h_q=16, topk=64, extra_page_bytes=2 * page_bytes("v32", 64))
    assert x.cache.stride(0) == 3 * 64 * 656
    out, lse = call(x)
    check(out, lse, x)


def test_vllm_larger_pages_viewed_as_pages_of_64(device: str) -> None:
    """Pages of 128 tokens with 64 rows of padding behind them, seen as pages of 64: the padding has slots too."""
    stored = make_cache("v32", pages=3, page=128, extra_page_bytes=64 * 656)
    store = stored.as_strided((stored.untyped_storage().size(),), (1,))
    viewed = store.view(9, 64, 656)
    x = make_inputs("v32", device, b=2, h_q=8, topk=96)
    slots = torch.randint(0, 3 * 128, x.indices.shape, generator=torch.Generator().manual_seed(5))
    x.indices = (slots // 128 * 192 + slots % 128).int().to(device)
    x.cache = move_cache(viewed, device)
    out, lse = call(x)
    check(out, lse, x)
    assert torch.isfinite(out).all()  # the padding is NaN codes


def test_vllm_hy_v4_has_sinks(device: str) -> None:
    x = make_inputs("v32", device, b=2, h_q=64, topk=64)
    sink = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(device)
    sink[0], sink[1] = math.inf, -math.inf
    out, lse = call(x, attn_sink=sink)
    check(out, lse, x, attn_sink=sink)
    assert (out[:, :, 0] == 0).all()


@pytest.mark.parametrize("num_heads", [64, 128])
def test_vllm_v4_writes_into_out(device: str, num_heads: int, decode_or_refuse: Decode) -> None:
    """Two caches with pages of their own, lengths, sinks, no tables; the engine looks at its own output alone."""
    tokens = 4
    x = make_inputs("v4", device, b=tokens, h_q=num_heads, topk=64)
    extra = move_cache(make_cache("v4", pages=6, page=4, seed=9), device)
    extra_indices = torch.randint(0, 24, (tokens, 1, 12), dtype=torch.int32).to(device)
    options = {
        "topk_length": torch.tensor([64, 3, 0, 40], dtype=torch.int32, device=device),
        "attn_sink": torch.zeros(num_heads, device=device),
        "extra_topk_length": torch.tensor([12, 0, 0, 5], dtype=torch.int32, device=device),
    }
    output = torch.full((tokens, num_heads + 3, 512), 7.0, dtype=torch.bfloat16, device=device)[:, :num_heads]
    result = decode_or_refuse(
        "v4",
        lambda: call(
            x,
            extra_k_cache=extra.unsqueeze(-2),
            extra_indices_in_kvcache=extra_indices,
            out=output.unsqueeze(1),
            **options,
        ),
    )
    if result is None:
        assert (output == 7.0).all()
        return
    assert result[0].data_ptr() == output.data_ptr()
    check(output.unsqueeze(1), result[1], x, extra_cache=extra, extra_indices=extra_indices, **options)


# ---- SGLang ----


@pytest.mark.parametrize("num_heads", [64, 128])
def test_sglang_older_metadata(device: str, num_heads: int) -> None:
    tokens, topk = 5, 64
    x = make_inputs("v32", device, b=tokens, h_q=num_heads, topk=topk)
    lengths = torch.full((tokens,), 300, dtype=torch.int32, device=device)
    metadata, num_splits = compat.get_mla_metadata(
        cache_seqlens=lengths,
        num_q_tokens_per_head_k=num_heads,
        num_heads_k=1,
        num_heads_q=num_heads,
        is_fp8_kvcache=True,
        topk=topk,
    )
    assert isinstance(metadata, torch.Tensor) and isinstance(num_splits, torch.Tensor)
    assert metadata.dtype == num_splits.dtype == torch.int32
    assert num_splits.shape == (tokens + 1,)
    x.cache = x.cache.view(-1, 64, 1, 656)
    out, lse = call(
        x,
        block_table=torch.empty(tokens, 0, dtype=torch.int32, device=device),
        cache_seqlens=lengths,
        tile_scheduler_metadata=metadata,
        num_splits=num_splits,
        descale_q=None,
        descale_k=None,
        kv_format="V32",
        use_legacy=True,
    )
    check(out, lse, x)


def test_sglang_copies_metadata_into_buffers_of_a_graph(device: str) -> None:
    largest = compat.get_mla_metadata(torch.ones(16, dtype=torch.int32, device=device), 64, 1)
    smaller = compat.get_mla_metadata(torch.ones(3, dtype=torch.int32, device=device), 64, 1)
    assert all(isinstance(part, torch.Tensor) for part in (*largest, *smaller))
    largest[0].copy_(smaller[0])  # type: ignore[union-attr, arg-type]
    largest[1][:4].copy_(smaller[1])  # type: ignore[index, arg-type]


def test_base_two_lse(device: str) -> None:
    x = make_inputs("v32", device, h_q=8)
    x.indices[1] = -1
    _, natural = call(x)
    _, binary = call(x, return_log2_lse=True)
    torch.testing.assert_close(binary[0], natural[0] * math.log2(math.e), rtol=1e-6, atol=0)
    assert torch.isposinf(binary[1]).all()


# ---- Common to both ----


@pytest.mark.parametrize("num_heads", [8, 16, 32])
def test_few_heads_need_no_padding(device: str, num_heads: int) -> None:
    x = make_inputs("v32", device, b=3, h_q=num_heads, topk=2051 if num_heads == 8 else 100)
    out, lse = call(x)
    check(out, lse, x)


def test_padded_rows_of_a_graph_hold_stale_indices(device: str) -> None:
    x = make_inputs("v32", device, b=6, h_q=16, topk=64)
    x.indices[3] = torch.randint(-(2**31), 2**31 - 1, (1, 64), dtype=torch.int64).int().to(device)
    x.indices[4] = 2**31 - 1
    x.indices[5] = -1
    out, lse = call(x)
    check(out, lse, x)
    assert torch.isposinf(lse[4:]).all()


def test_empty_row_is_plus_infinity_and_nan_stays_nan(device: str) -> None:
    x = make_inputs("v32", device, b=3, h_q=8, topk=4)
    x.indices[0] = -1
    x.q[1] = math.nan
    out, lse = call(x)
    assert torch.isposinf(lse[0]).all() and (out[0] == 0).all()
    assert torch.isnan(lse[1]).all() and torch.isnan(out[1]).all()
    assert torch.isfinite(lse[2]).all()


def test_metadata_serves_any_call_again(device: str) -> None:
    """One object for calls that differ in everything; also an object of somebody else, and none."""
    metadata, second = compat.get_mla_metadata()
    assert isinstance(metadata, compat.FlashMLASchedMeta)
    assert second is None
    for options in ({"b": 2}, {"b": 5, "topk": 7}, {"b": 1, "s_q": 3, "h_q": 32}):
        x = make_inputs("v32", device, **options)
        out, lse = call(x, tile_scheduler_metadata=metadata, num_splits=second)
        check(out, lse, x)
    x = make_inputs("v32", device)
    first = call(x)
    for other in (None, object(), torch.ones(132, 8, dtype=torch.int32, device=device)):
        out, lse = call(x, tile_scheduler_metadata=other)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


def test_positions_of_the_arguments(device: str) -> None:
    x = make_inputs("v32", device, h_q=8)
    expected = call(x, softmax_scale=0.03)
    out, lse = compat.flash_mla_with_kvcache(
        x.q, x.cache.unsqueeze(-2), None, None, 512, compat.get_mla_metadata()[0], None, 0.03, False, True, x.indices
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_scale_defaults_to_the_width_of_the_query(device: str) -> None:
    x = make_inputs("v32", device, h_q=8)
    out, lse = call(x, softmax_scale=None)
    check(out, lse, x)


def test_three_dimensional_cache_and_topk_length(device: str) -> None:
    x = make_inputs("v32", device, b=3, s_q=2, h_q=8)
    lengths = torch.tensor([5, 0, 64], dtype=torch.int32, device=device)
    out, lse = compat.flash_mla_with_kvcache(
        x.q, x.cache, None, None, 512, None, is_fp8_kvcache=True, indices=x.indices, topk_length=lengths
    )
    check(out, lse, x, topk_length=lengths)


def test_batch_invariant(device: str) -> None:
    x = make_inputs("v32", device, b=5, h_q=16, topk=512)
    out, lse = call(x, enable_batch_invariant=True)
    check(out, lse, x)
    for i in range(5):
        alone = Inputs(x.q[i : i + 1], x.cache, x.indices[i : i + 1], "v32")
        one_out, one_lse = call(alone, enable_batch_invariant=True)
        assert torch.equal(one_out[0], out[i]) and torch.equal(one_lse[0], lse[i])


@pytest.mark.parametrize("fmt", ["bf16", "bf16nope"])
def test_bf16_cache(device: str, decode_or_refuse: Decode, fmt: str) -> None:
    x = make_inputs(fmt, device, h_q=16)
    result = decode_or_refuse(fmt, lambda: call(x, is_fp8_kvcache=False))
    if result is not None:
        check(*result, x)


@pytest.mark.parametrize(
    ("fmt", "kv_format"),
    [
        ("v32", "V32"),
        ("v4", "V4"),
        ("v32nope", "V32_NO_ROPE"),
        ("v32nope_compact", "V32_NO_ROPE"),
        ("v41", "V41"),
        ("v41plane", "V41_PLANE"),
    ],
)
def test_named_formats(device: str, decode_or_refuse: Decode, fmt: str, kv_format: str) -> None:
    x = make_inputs(fmt, device, b=3, h_q=16)
    x.indices[1] = -1
    result = decode_or_refuse(fmt, lambda: call(x, kv_format=kv_format))
    if result is not None:
        check(*result, x)


@pytest.mark.parametrize("byte_type", [torch.int8, torch.float8_e4m3fn])
def test_other_names_for_bytes(device: str, byte_type: torch.dtype) -> None:
    x = make_inputs("v32", device, h_q=8)
    out, lse = call(x)
    typed = Inputs(x.q, x.cache.view(byte_type), x.indices, "v32")
    again, _ = call(typed)
    assert torch.equal(out, again)


def test_inside_torch_compile(device: str) -> None:
    """One graph without breaks, with out written to and +inf for the empty row."""
    x = make_inputs("v32", device, b=2, h_q=8)
    x.indices[1] = -1
    expected = call(x)
    out = torch.zeros_like(expected[0])
    compiled = torch.compile(compat.flash_mla_with_kvcache, backend="aot_eager", fullgraph=True)
    _, lse = compiled(x.q, x.cache, None, None, 512, None, is_fp8_kvcache=True, indices=x.indices, out=out)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert lse.stride() == expected[1].stride()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing of this was run on a GPU")
def test_a_graph_replays_with_other_contents() -> None:
    """Recorded with padded rows; replayed with other queries and indices, the +inf of empty rows included."""
    x, y = (make_inputs("v32", "cuda", b=4, h_q=16, seed=seed) for seed in (0, 1))
    y.indices[2:] = -1
    y.cache = x.cache
    metadata, _ = compat.get_mla_metadata()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(x, tile_scheduler_metadata=metadata)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(x, tile_scheduler_metadata=metadata)
    expected = call(y)
    x.q.copy_(y.q)
    x.indices.copy_(y.indices)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    check(out, lse, y)


# ---- What is refused ----


def refuse(error: type[Exception], words: list[str], function: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        function()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_missing_modes_are_named() -> None:
    x = make_inputs("v32", "cpu", h_q=8)
    refuse(NotImplementedError, ["dense", "indices", "sparse decoding"], lambda: call(x, indices=None))
    for unknown in ("V41_FP4", "V5"):
        refuse(NotImplementedError, [unknown, "V32_NO_ROPE", "V41_PLANE"], lambda name=unknown: call(x, kv_format=name))
    refuse(NotImplementedError, ["prefill", "sparse decoding"], lambda: compat.flash_mla_sparse_fwd(x.q, x.cache))
    narrow = Inputs(x.q[..., :512], x.cache, x.indices, "v32")
    four_bits = Inputs(narrow.q, torch.zeros(2, 64, 288, dtype=torch.uint8), x.indices, "v32")
    refuse(NotImplementedError, ["288", "V41"], lambda: call(four_bits))
    # What has to be named says its names.
    refuse(ValueError, ["V32_NO_ROPE", "512"], lambda: call(narrow))
    ambiguous = Inputs(narrow.q, torch.zeros(2, 64, 528, dtype=torch.uint8), x.indices, "v41")
    refuse(ValueError, ["528", "'V41'", "'V41_PLANE'", "'V32_NO_ROPE'"], lambda: call(ambiguous))
    refuse(ValueError, ["656", "V41", "528"], lambda: call(narrow, kv_format="V41"))


def test_wrong_arguments_are_named() -> None:
    x = make_inputs("v32", "cpu", h_q=8)
    refuse(ValueError, ["causal"], lambda: call(x, causal=True))
    refuse(ValueError, ["head_dim_v", "256"], lambda: call(x, head_dim_v=256))
    refuse(ValueError, ["is_fp8_kvcache", "uint8"], lambda: call(x, is_fp8_kvcache=False))
    bf16 = make_inputs("bf16", "cpu", h_q=8)
    refuse(ValueError, ["is_fp8_kvcache", "bfloat16"], lambda: call(bf16))
    odd = Inputs(x.q, torch.zeros(2, 64, 600, dtype=torch.uint8), x.indices, "v32")
    refuse(ValueError, ["600", "656"], lambda: call(odd))
    flat = Inputs(x.q[:, 0], x.cache, x.indices, "v32")
    refuse(ValueError, ["q", "[b, s_q, h_q, d_qk]"], lambda: call(flat))
    refuse(TypeError, ["speed"], lambda: call(x, speed="high"))
