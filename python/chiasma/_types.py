"""What queries return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What decode() will do for tensors of these shapes. print(plan) shows the choice and its reasons."""

    kernel: str  #: the kernel's name
    workspace_bytes: int  #: scratch memory of one call
    text: str  #: what was chosen and why, in several lines

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class KernelInfo:
    """A kernel of this build."""

    name: str  #: what decode(kernel=...) and the environment's CHIASMA_KERNEL take
    device: str  #: "cpu" or "cuda"
    summary: str  #: one line
    supports: str  #: one line: formats, heads, options, hardware


@dataclass(frozen=True)
class DeviceInfo:
    """A device that this build can use on this machine."""

    device: str  #: "cpu" or "cuda:N"
    name: str
    compute_units: int  #: CPU: hardware threads that the process may use; CUDA: multiprocessors
    cuda_capability: int  #: major * 10 + minor; 0 for the CPU
    memory_bytes: int
