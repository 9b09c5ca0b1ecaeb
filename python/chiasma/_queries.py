"""What this build has and where it runs."""

from __future__ import annotations

from . import _native
from ._types import DeviceInfo, KernelInfo

__version__ = _native.version()
_DEVICE_KINDS = {1: "cpu", 2: "cuda"}


def kernels() -> list[KernelInfo]:
    """The decode kernels of this build, in the order in which they are preferred.

    >>> [kernel.name for kernel in chiasma.kernels() if kernel.device == "cpu"]
    ['cpu_simd']
    """
    return [
        KernelInfo(name, _DEVICE_KINDS[kind], summary, supports) for name, kind, summary, supports in _native.kernels()
    ]


def devices() -> list[DeviceInfo]:
    """The devices that this build can use on this machine; the CPU is the first.

    >>> chiasma.devices()[0].device
    'cpu'
    """
    return [
        DeviceInfo("cpu" if kind == 1 else f"cuda:{index}", name, units, capability, memory)
        for kind, index, name, units, capability, memory in _native.devices()
    ]
