"""PyTorch's machinery around the calls: operators, torch.compile, streams, CUDA graphs, autograd."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import chiasma
from reference import FORMATS, KEY_DIM, cache_options, key_rows, make_inputs, move_cache

NO_CUDA = "no CUDA device: nothing of this was run on a GPU"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")),
]
ops = torch.ops.chiasma


def example(
    device: str, b: int = 2, s_q: int = 1, h_q: int = 4, topk: int = 9, pages: int = 3, page: int = 8, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, a v32 cache and indices."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, s_q, h_q, 576, generator=generator).bfloat16()
    kv = torch.randn(pages, page, 576, generator=generator).bfloat16()
    indices = torch.randint(-2, pages * page, (b, s_q, topk), generator=generator, dtype=torch.int32)
    return q.to(device), chiasma.quantize(kv).to(device), indices.to(device)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a is None and b is None or torch.equal(a, b)


# ---- Operators ----


def calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    q, cache, indices = example(device)
    kv = torch.randn(3, 8, 576, device=device).bfloat16()
    new = torch.randn(5, 576, device=device).bfloat16()
    slots = torch.tensor([0, -1, 7, 23, 8], device=device)
    table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32, device=device)
    lens = torch.tensor([9, 3], dtype=torch.int32, device=device)
    parts, part_lse = torch.randn(2, 2, 1, 4, 512, device=device), torch.randn(2, 2, 1, 4, device=device)
    out = torch.empty(2, 1, 4, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(2, 1, 4, device=device)
    tokens = torch.randint(0, 16, (2, 6), device=device)
    rows = torch.zeros(14, 576, device=device)
    starts = torch.tensor([0, 10], device=device)
    absent = (None,) * 5
    fp8 = chiasma.quantize(kv, format="fp8", kv_scale=0.5)
    return {
        "decode": (ops.decode.default, (q, None, cache, indices)),
        "decode with every option": (
            ops.decode.default,
            (q[..., :512], q[..., 512:], cache, indices.long(), lens, torch.zeros(4, device=device), None, None, None)
            + ("v32", 0.1, None, True, 1.0),
        ),
        "decode fp8": (ops.decode.default, (q, None, fp8, indices, *absent, "fp8", None, None, False, 0.5)),
        "decode_out": (ops.decode_out.default, (q, None, cache, indices, *absent, out, lse, None)),
        "merge": (ops.merge.default, (parts, part_lse)),
        "merge of parts with +inf": (ops.merge.default, (parts, part_lse, True)),
        "merge_out": (ops.merge_out.default, (parts, part_lse, out, lse)),
        "quantize": (ops.quantize.default, (kv,)),
        "quantize v4": (ops.quantize.default, (kv[..., :512], "v4")),
        "quantize v41plane": (ops.quantize.default, (kv[..., :512], "v41plane")),
        "quantize fp8": (ops.quantize.default, (kv, "fp8", "pow2", 0.5)),
        "quantize bf16nope": (ops.quantize.default, (kv[..., :512], "bf16nope")),
        "quantize_out": (ops.quantize_out.default, (kv, cache.clone())),
        "dequantize": (ops.dequantize.default, (cache, None, "bfloat16")),
        "dequantize fp8": (ops.dequantize.default, (fp8, "fp8", "float32", 0.5)),
        "dequantize_out": (ops.dequantize_out.default, (cache, torch.empty(3, 8, 576, device=device))),
        "quantize_and_append": (
            ops.quantize_and_append.default,
            (new[:, :512], new[:, 512:], cache.clone(), slots, None, "pow2")
            + (torch.zeros_like(slots[:1]), torch.zeros_like(slots[:1])),
        ),
        "quantize_and_append without k_pe": (
            ops.quantize_and_append.default,
            (new, None, fp8.clone(), slots, "fp8", "pow2", None, None, 0.5),
        ),
        "gather_dequantize fp8": (
            ops.gather_dequantize.default,
            (fp8, slots, None, None, None, None, "float32", "fp8", 0.5),
        ),
        "gather_dequantize": (ops.gather_dequantize.default, (cache, slots)),
        "gather_dequantize by table": (
            ops.gather_dequantize.default,
            (cache, None, table, lens, starts, 14, "float32"),
        ),
        "gather_dequantize_out": (ops.gather_dequantize_out.default, (cache, None, table, lens, starts, rows)),
        "translate_indices": (ops.translate_indices.default, (tokens, table, None, 8)),
        "translate_indices_out": (ops.translate_indices_out.default, (tokens, table, None, tokens.int(), 8)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_opcheck(name: str, device: str) -> None:
    operator, arguments = calls(device)[name]
    torch.library.opcheck(operator, arguments)


def test_what_is_written_to_has_no_default() -> None:
    """PyTorch before 2.13 raises IndexError where such an argument is left out, or given as its default."""
    written = {
        (str(operator), argument.name): argument.has_default_value()
        for operator, _ in calls("cpu").values()
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert ("chiasma.decode_out.default", "workspace") in written and not any(written.values()), written


def test_operator_has_the_functions_bits() -> None:
    q, cache, indices = example("cpu")
    assert same(ops.decode(q, None, cache, indices), chiasma.decode(q, cache, indices))


def test_fake_tensors_outside_of_compile() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q, cache, indices = (mode.from_tensor(tensor) for tensor in example("cpu"))
        out, lse = chiasma.decode(q, cache, indices)
    assert out.shape == (2, 1, 4, 512) and out.dtype == torch.bfloat16 and lse.shape == (2, 1, 4)


# ---- torch.compile ----


def step(
    q: torch.Tensor,
    cache: torch.Tensor,
    tokens: torch.Tensor,
    table: torch.Tensor,
    new: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """All that a layer does, with work of PyTorch's own between."""
    chiasma.quantize_and_append(new[:, :512], new[:, 512:], cache, slots)
    indices = chiasma.translate_indices(tokens, table, page=8)
    out, lse = chiasma.decode((q[..., :512] * 2, q[..., 512:]), cache, indices.view(2, 1, -1))
    given = torch.empty_like(out)
    lengths = (indices >= 0).sum(-1, dtype=torch.int32)
    _, second = chiasma.decode(q, cache, indices.view(2, 1, -1), topk_length=lengths, out=given)
    both, both_lse = chiasma.merge([out, given], [lse, second])
    rows = chiasma.gather_dequantize(cache, slots, dtype=torch.float32)
    return both + 1, both_lse, rows, chiasma.dequantize(cache).sum(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_fullgraph(backend: str, device: str) -> None:
    q, cache, _ = example(device)
    tokens = torch.tensor([[0, 3, 9, 15], [1, 2, -1, 7]], device=device)
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32, device=device)
    new = torch.randn(2, 576, device=device).bfloat16()
    slots = torch.tensor([19, 12], device=device)
    plain_cache, compiled_cache = cache.clone(), cache.clone()
    expected = step(q, plain_cache, tokens, table, new, slots)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = compiled(q, compiled_cache, tokens, table, new, slots)
    # Inductor may fuse q * 2 and + 1 without rounding between.
    for result, reference in zip(results, expected):
        torch.testing.assert_close(result, reference, rtol=1e-2, atol=1e-2)
    assert torch.equal(compiled_cache, plain_cache) and not torch.equal(compiled_cache, cache)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt not in ("v32", "v4", "bf16")])
def test_compile_every_format(fmt: str) -> None:
    """Format and kv_scale reach every operator."""
    x = make_inputs(fmt, "cpu", h_q=4, topk=9, pages=3, page=8)
    options: Any = cache_options(fmt)
    slots = torch.tensor([0, 9, -1])

    def work(q: torch.Tensor, cache: torch.Tensor, kv: torch.Tensor) -> tuple[Any, ...]:
        new = chiasma.quantize(kv, format=fmt, kv_scale=options.get("kv_scale"))
        chiasma.quantize_and_append(kv[0], None, cache, torch.arange(8), **options)
        rows = chiasma.gather_dequantize(cache, slots, **options)
        return *chiasma.decode(q, cache, x.indices, **options), rows, chiasma.dequantize(new, **options)

    kv = torch.randn(3, 8, KEY_DIM[fmt], generator=torch.Generator().manual_seed(4)).bfloat16()
    caches = [move_cache(x.cache, "cpu") for _ in range(2)]
    expected = work(x.q, caches[0], kv)
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    assert same(compiled(x.q, caches[1], kv), expected) and torch.equal(*(key_rows(c, fmt) for c in caches))


@pytest.mark.parametrize("rank", [4, 3])
def test_compile_with_dynamic_shapes(rank: int) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(chiasma.decode, fullgraph=True, dynamic=True, backend=backend)
    for b, topk in ((2, 9), (5, 4), (3, 17)):
        q, cache, indices = example("cpu", b=b, topk=topk)
        if rank == 3:
            q, indices = q[:, 0], indices[:, 0]
        assert same(compiled(q, cache, indices), chiasma.decode(q, cache, indices))
    assert len(graphs) == 1


# ---- Autograd ----


def test_gradients_are_refused_unless_nobody_wants_them() -> None:
    q, cache, indices = example("cpu")
    expected = chiasma.decode(q, cache, indices)
    q.requires_grad_()
    with pytest.raises(ValueError, match=r"q requires grad.*no_grad.*q\.detach"):
        chiasma.decode(q, cache, indices)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same(chiasma.decode(q, cache, indices), expected)
    assert same(chiasma.decode(q.detach(), cache, indices), expected)


def test_parameters_and_other_subclasses_are_tensors() -> None:
    q, cache, indices = example("cpu")

    class Named(torch.Tensor):
        pass

    expected = chiasma.decode(q, cache, indices)
    with torch.no_grad():
        for given in (torch.nn.Parameter(q), q.as_subclass(Named)):
            out, lse = chiasma.decode(given, cache, indices)
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


# ---- GPUs ----


@needs_cuda
def test_current_stream() -> None:
    """The decode waits for what its stream has to do before, and nothing else does."""
    q, cache, indices = example("cuda")
    expected = chiasma.decode(q, cache, indices)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        result = chiasma.decode(late, cache, indices)
        assert not stream.query()  # queued, not waited for
    stream.synchronize()
    assert same(result, expected)


@needs_cuda
@pytest.mark.parametrize("given", [True, False])
def test_cuda_graph_with_other_lengths_and_padded_rows(given: bool) -> None:
    """Captured at a padded batch, replayed with other lengths, other indices and fewer live rows."""
    b, topk, pages = 16, 512, 40
    q, cache, indices = example("cuda", b=b, h_q=16, topk=topk, pages=pages, page=64)
    lengths = torch.full((b,), topk, dtype=torch.int32, device="cuda")
    out = torch.empty(b, 1, 16, 512, dtype=torch.bfloat16, device="cuda") if given else None
    lse = torch.empty(b, 1, 16, device="cuda") if given else None
    scratch = None
    if given:
        needed = chiasma.plan(q, cache, indices, topk_length=lengths).workspace_bytes
        scratch = torch.empty(max(needed, 1), dtype=torch.uint8, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return chiasma.decode(q, cache, indices, topk_length=lengths, out=out, lse=lse, workspace=scratch)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed, live in ((2, b), (3, 5), (4, 1)):
        new_q, _, new_indices = example("cuda", b=b, h_q=16, topk=topk, pages=pages, page=64, seed=seed)
        new_indices[live:] = -1 if seed % 2 else 1_000_000_000  # stale rows
        q.copy_(new_q)
        indices.copy_(new_indices)
        lengths.copy_(torch.arange(b, device="cuda", dtype=torch.int32) * 37 % (topk + 1))
        graph.replay()
        torch.cuda.synchronize()
        eager = chiasma.decode(q, cache, indices, topk_length=lengths)
        assert same(captured, eager)
        assert (captured[0][live:] == 0).all() and (captured[1][live:] == -torch.inf).all()


@needs_cuda
def test_int64_indices_and_default_workspace_on_a_gpu() -> None:
    q, cache, indices = example("cuda", b=3, h_q=16, topk=2048, pages=40, page=64)
    assert same(chiasma.decode(q, cache, indices.long()), chiasma.decode(q, cache, indices))


@needs_cuda
def test_no_memory_is_kept_on_a_gpu() -> None:
    q, cache, indices = example("cuda", b=4, h_q=16, topk=2048, pages=40, page=64)
    chiasma.decode(q, cache, indices)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        chiasma.decode(q, cache, indices.long())
    assert torch.cuda.memory_allocated() == before


@needs_cuda
def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device: nothing of this was run on a second")
    arguments = example("cuda:1", h_q=16)
    assert torch.cuda.current_device() == 0
    out, lse = chiasma.decode(*arguments)
    assert out.device == lse.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    first = chiasma.decode(*(tensor.to("cuda:0") for tensor in arguments))
    assert torch.equal(out.cpu(), first[0].cpu()) and torch.equal(lse.cpu(), first[1].cpu())


@needs_cuda
def test_tensors_on_two_devices_are_refused() -> None:
    q, cache, indices = example("cuda")
    with pytest.raises(ValueError, match="indices"):
        chiasma.decode(q, cache, indices.cpu())


