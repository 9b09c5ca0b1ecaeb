"""The package is there, imports, decodes, and cleans up after itself."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import chiasma


def example(
    b: int = 2, s_q: int = 1, h_q: int = 4, topk: int = 9, pages: int = 3, page: int = 8, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, a v32 cache and indices."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, s_q, h_q, 576, generator=generator).bfloat16()
    kv = torch.randn(pages, page, 576, generator=generator).bfloat16()
    indices = torch.randint(-2, pages * page, (b, s_q, topk), generator=generator, dtype=torch.int32)
    return q, chiasma.quantize(kv), indices


def reference(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = chiasma.dequantize(cache).view(-1, 576).double()
    valid = indices >= 0
    keys = rows[indices.clamp(min=0).long()]
    scores = torch.einsum("bshd,bskd->bshk", q.double(), keys) * 576**-0.5
    scores = scores.masked_fill(~valid[:, :, None], -torch.inf)
    return torch.einsum("bshk,bskd->bshd", scores.softmax(-1), keys[..., :512]), scores.logsumexp(-1)


def test_decode_is_right() -> None:
    q, cache, indices = example()
    out, lse = chiasma.decode(q, cache, indices)
    expected_out, expected_lse = reference(q, cache, indices)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 1, 4, 512) and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)


def test_outputs_workspace_pairs_and_ranks_change_nothing() -> None:
    q, cache, indices = example(s_q=1)
    out, lse = chiasma.decode(q, cache, indices)
    given = torch.empty(2, 1, 4, 600, dtype=torch.bfloat16)[..., :512]
    given_lse = torch.empty(2, 4, 1).transpose(1, 2)
    needed = chiasma.plan(q, cache, indices).workspace_bytes
    scratch = torch.empty(needed + 256, dtype=torch.uint8)
    scratch = scratch[-scratch.data_ptr() % 256 :]
    result = chiasma.decode((q[..., :512], q[..., 512:]), cache, indices, out=given, lse=given_lse, workspace=scratch)
    assert result[0] is given and result[1] is given_lse
    assert torch.equal(given, out) and torch.equal(given_lse, lse)
    flat_out, flat_lse = chiasma.decode(q[:, 0], cache[:, :, None], indices[:, 0].long())
    assert torch.equal(flat_out, out[:, 0]) and torch.equal(flat_lse, lse[:, 0])
    for same in (cache.view(torch.int8), cache.view(torch.float8_e4m3fn)):
        assert torch.equal(chiasma.decode(q, same, indices)[0], out)
    assert torch.equal(chiasma.decode(q.view(torch.uint16), cache, indices, out=given)[0], out)


def test_an_empty_row_is_zero_and_minus_infinity() -> None:
    q, cache, indices = example()
    out, lse = chiasma.decode(q, cache, torch.full_like(indices, -1))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_plan_and_queries_say_something() -> None:
    plan = chiasma.plan(*example())
    assert plan.kernel in [kernel.name for kernel in chiasma.kernels()]
    assert plan.kernel in str(plan) and plan.workspace_bytes >= 0
    assert chiasma.devices()[0].device == "cpu" and chiasma.devices()[0].compute_units > 0
    assert chiasma.__version__.count(".") == 2


def test_environment_chooses_the_kernel_of_a_call_already_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = example()
    chiasma.decode(*arguments)
    monkeypatch.setenv("CHIASMA_KERNEL", "none_such")
    with pytest.raises(NotImplementedError, match="none_such"):
        chiasma.decode(*arguments)
    monkeypatch.delenv("CHIASMA_KERNEL")
    chiasma.decode(*arguments)


def test_many_threads_and_many_shapes() -> None:
    """More shapes than plans are kept, from several threads: same bits as alone."""
    shapes = [(1 + n % 3, 1, 1 + n % 5, 1 + n) for n in range(300)]
    inputs = [example(b=b, s_q=s, h_q=h, topk=k) for b, s, h, k in shapes]
    expected = [chiasma.decode(*arguments)[0] for arguments in inputs]
    wrong: list[int] = []

    def work(first: int) -> None:
        for n in range(first, len(inputs), 2):
            if not torch.equal(chiasma.decode(*inputs[n])[0], expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_tensor_is_kept() -> None:
    import gc
    import weakref

    q, cache, indices = example()
    out, lse = chiasma.decode(q, cache, indices)
    watched = [weakref.ref(tensor) for tensor in (q, cache, indices, out, lse)]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (q, cache)]
    del q, cache, indices, out, lse
    gc.collect()
    assert all(tensor() is None for tensor in watched) and all(storage() is None for storage in storages)


def test_float16_query_ends_with_the_remedy() -> None:
    q, cache, indices = example()
    with pytest.raises(TypeError, match=r"q\.to\(torch\.bfloat16\)$"):
        chiasma.decode(q.half(), cache, indices)


def test_traceback_has_only_lines_of_python() -> None:
    q, cache, indices = example()
    with pytest.raises(ValueError) as caught:
        chiasma.decode(q[..., :5], cache, indices)
    assert all(entry.path.suffix == ".py" for entry in caught.traceback)


def test_imports_without_pytorch() -> None:
    code = "import sys; sys.modules['torch'] = None; import chiasma; print(chiasma.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == chiasma.__version__, done.stderr
