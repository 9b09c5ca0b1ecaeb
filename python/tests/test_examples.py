"""The programs under examples/ run and say what they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_quick_start() -> None:
    done = run("quick_start.py")
    assert done.returncode == 0, done.stderr
    assert "(2, 1, 16, 512) (2, 1, 16)" in done.stdout


def test_decode_loop(device: str) -> None:
    done = run("decode_loop.py", "--device", device)
    assert done.returncode == 0, done.stderr
    assert "64 steps" in done.stdout and "bound" in done.stdout


def test_decode_loop_notices_a_wrong_result(tmp_path: Path) -> None:
    """The same loop over a cache whose appended rows are doubled, so that its check has something to find."""
    script = tmp_path / "wrong_loop.py"
    script.write_text(
        "import sys, chiasma\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import decode_loop\n"
        "append = chiasma.quantize_and_append\n"
        "chiasma.quantize_and_append = lambda latent, *rest: append(2 * latent, *rest)\n"
        "sys.exit(decode_loop.main())\n",
        encoding="utf-8",
    )
    done = run(str(script), "--steps", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "step 0: relative error" in done.stderr


def find_program() -> str | None:
    return os.environ.get("CHIASMA_CLI") or shutil.which("chiasma")


def test_save_for_cli(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "input.safetensors"
    done = run("save_for_cli.py", str(path))
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    tensors = load_file(path)
    assert set(tensors) == {"q", "kv_cache", "indices"}
    assert tensors["kv_cache"].dtype == torch.uint8 and tensors["kv_cache"].shape == (8, 64, 656)


def test_answer_of_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    program = find_program()
    if program is None:
        pytest.skip("no program chiasma on PATH, and CHIASMA_CLI does not name one")
    files = [str(tmp_path / name) for name in ("in.safetensors", "out.safetensors")]
    done = run("save_for_cli.py", files[0], "--cli", program, "--output", files[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differs by" in done.stdout
