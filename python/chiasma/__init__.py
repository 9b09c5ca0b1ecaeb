"""Chiasma: sparse MLA decoding attention over FP8 KV caches, on CPUs and NVIDIA Hopper GPUs.

    import chiasma
    out, lse = chiasma.decode(q, kv_cache, indices)

Tensors are those of PyTorch, JAX, CuPy or NumPy; results are of the framework that the first one came from. Names of
shapes: b requests, s_q query tokens of a request, h_q query heads (1 to 128), topk selected tokens of a query token,
page tokens of a cache page, d_qk width of a query and key (576 or 512, by format), width that of a cached token (bytes,
or numbers of bf16).

Errors: ValueError for an argument that breaks a rule, TypeError for a wrong dtype or what is no tensor,
NotImplementedError if no kernel of this build and device does it, RuntimeError for a device's trouble, MemoryError. The
message names the argument, its value and what is allowed.
"""

from ._cache_ops import dequantize, gather_dequantize, quantize, quantize_and_append, translate_indices
from ._decode import decode, merge, plan
from ._queries import __version__, devices, kernels
from ._types import DeviceInfo, KernelInfo, Plan

__all__ = [
    "DeviceInfo",
    "KernelInfo",
    "Plan",
    "__version__",
    "decode",
    "dequantize",
    "devices",
    "gather_dequantize",
    "kernels",
    "merge",
    "plan",
    "quantize",
    "quantize_and_append",
    "translate_indices",
]
