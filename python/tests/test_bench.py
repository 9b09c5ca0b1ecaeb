"""python -m chiasma.bench: what it writes, and what it refuses to time."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasma import _bench_methods, bench

SMALL = ["--heads", "4", "--batch", "1,3", "--topk", "70", "--page", "61", "--pool", "100", "--rounds", "6"]


def test_report(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert bench.main([*SMALL, "--device", device, "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    for key in ("gpu", "driver", "cuda", "torch", "commit", "chiasma"):
        assert key in report
    assert [(case["heads"], case["batch"], case["topk"]) for case in report["cases"]] == [(4, 1, 70), (4, 3, 70)]
    for case in report["cases"]:
        for name in ("chiasma", "pytorch"):
            result = case["results"][name]
            assert 0 < result["max_relative_l2_error"] < 1e-2
            for kind in ("warm", "cold") if device == "cuda" else ("warm",):
                t = result["microseconds"][kind]
                assert 0 < t["min"] <= t["p10"] <= t["median"] <= t["p90"] and t["n"] == 6
    assert torch.is_grad_enabled()
    captured = capsys.readouterr()
    assert "chiasma" in captured.out and "median us" in captured.out
    assert "[2/2]" in captured.err


def off_by_five_percent(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrong(problem: Any) -> Any:
        method = make(problem)
        return lambda: method() * 1.05

    return wrong


def never(*_: object) -> Any:
    raise AssertionError("timed although the result is wrong")


def test_own_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_bench_methods, "chiasma_method", off_by_five_percent(_bench_methods.chiasma_method))
    monkeypatch.setattr(bench, "measure", never)
    assert bench.main([*SMALL, "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "not timed" in captured.out and "wrong" in captured.err


def test_wrong_result_of_another_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(_bench_methods, "pytorch_method", off_by_five_percent(_bench_methods.pytorch_method))
    path = tmp_path / "out.json"
    assert bench.main([*SMALL, "--device", "cpu", "--json", str(path)]) == 0
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        assert "microseconds" in case["results"]["chiasma"]
        assert "microseconds" not in case["results"]["pytorch"]
        assert "wrong" in case["results"]["pytorch"]["failed"]
    assert "not timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--heads", "129"], "129"),
        (["--heads", "0"], "0"),
        (["--batch", "1,x"], "--batch"),
        (["--device", "tpu"], "tpu"),
        (["--scale", "max"], "max"),
        (["--page", "-1"], "--page"),
    ],
)
def test_wrong_options(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        bench.main(arguments)
    assert exit_status.value.code == 2
    assert word in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        bench.main(["--help"])
    assert exit_status.value.code == 0
    assert "python -m chiasma.bench --device cpu" in capsys.readouterr().out


def test_missing_device(capsys: pytest.CaptureFixture[str]) -> None:
    count = torch.cuda.device_count()
    assert bench.main(["--device", f"cuda:{count}"]) == 3
    assert f"there are {count} CUDA devices" in capsys.readouterr().err


def test_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.png"
    if importlib.util.find_spec("matplotlib") is not None:
        assert bench.main([*SMALL, "--device", "cpu", "--plot", str(path)]) == 0
        assert path.stat().st_size > 1000
        return
    monkeypatch.setattr(bench, "run_case", never)
    with pytest.raises(SystemExit) as exit_status:
        bench.main([*SMALL, "--plot", str(path)])
    assert exit_status.value.code == 2
    assert "matplotlib" in capsys.readouterr().err
