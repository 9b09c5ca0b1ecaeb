"""What all Python tests share: devices, hypothesis settings, and a last word on what was not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from reference import DECODE_FORMATS

# Fixed examples in a fixed number: a run is the same everywhere, and a slow machine fails nothing.
settings.register_profile(
    "chiasma", max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("chiasma")

_NO_CUDA = "no CUDA device: nothing of this was run on a GPU"


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(_NO_CUDA)
    return str(request.param)


@pytest.fixture
def decode_or_refuse(device: str) -> Callable[..., Any]:
    """decode_or_refuse(fmt, call): what call() returns, or None where this device has no kernel for the format; then
    call() has to raise NotImplementedError."""

    def run(fmt: str, call: Callable[[], Any]) -> Any:
        if fmt in DECODE_FORMATS[device]:
            return call()
        with pytest.raises(NotImplementedError):
            call()
        return None

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if _NO_CUDA in str(report.longrepr)]
    if skipped:
        terminalreporter.write_sep("!", f"{len(skipped)} tests skipped, {_NO_CUDA}", yellow=True)
