"""The interface of the module `flash_mla`, served by Chiasma: sparse decoding over FP8 caches.

    from chiasma.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

or, for an engine that imports `flash_mla` or a copy of it itself, before or after it did so:

    import chiasma.compat.flash_mla
    chiasma.compat.flash_mla.install()

Both generations of the interface are understood: metadata as an object made by get_mla_metadata(), and as the older
pair of tensors. Neither holds anything, because Chiasma plans from shapes alone; so metadata may be reused for any
call, and stays right when a CUDA graph is replayed. Differences from that module:

  - 1 to 128 query heads, any topk and page size, any index: what lies outside the cache is masked.
  - topk_length works for every format, as [b] or [b, s_q].
  - Dense decoding, prefill and the formats V32_NO_ROPE and V41 are missing; each raises NotImplementedError.
  - Wrong arguments raise ValueError or TypeError, where that module asserts.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import chiasma
from chiasma.compat._patching import Installation, install, uninstall

__all__ = [
    "FlashMLASchedMeta",
    "Installation",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "install",
    "uninstall",
]

_LOG2_E = math.log2(math.e)
_SUPPORTED = (
    "this module does sparse decoding (indices given) over V32 (656 bytes a token), V4 (584) and bf16 (576 wide)"
)
_FORMAT_NAMES = {"V32": "v32", "V4": "v4"}
_FORMAT_WIDTHS = {656: "v32", 584: "v4"}
# The formats that the interface knows and this library does not, with what a caller knows them by.
_MISSING_FORMATS = {"V32_NO_ROPE": "V3.2 rows without RoPE", "V41": "V4.1 rows", "V41_FP4": "V4.1 rows of 4 bits"}


class FlashMLASchedMeta:
    """What get_mla_metadata() returns. It stays as it is: nothing has to be remembered between calls."""

    def __init__(self) -> None:
        self.have_initialized: bool = False
        self.config: Any = None
        self.tile_scheduler_metadata: torch.Tensor | None = None
        self.num_splits: torch.Tensor | None = None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[FlashMLASchedMeta | torch.Tensor, torch.Tensor | None]:
    """Metadata for flash_mla_with_kvcache(), which looks at none of it.

    Without cache_seqlens: (FlashMLASchedMeta(), None). With cache_seqlens (b requests), as the older interface has it:
    (int32 [1, 8], int32 [b + 1]), all zeros, on its device. Their shapes depend on b alone, so that they can be copied
    into buffers that a CUDA graph keeps. Other arguments may be given as that interface names them, without effect.
    """
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    metadata = torch.zeros((1, 8), dtype=torch.int32, device=cache_seqlens.device)
    return metadata, metadata.new_zeros(cache_seqlens.numel() + 1)


def _cache_format(k_cache: torch.Tensor, q: torch.Tensor, is_fp8_kvcache: bool, kv_format: str | None) -> str:
    width = k_cache.shape[-1] if k_cache.dim() else 0
    if kv_format is not None and kv_format not in _FORMAT_NAMES and kv_format not in _MISSING_FORMATS:
        allowed = ", ".join((*_FORMAT_NAMES, *_MISSING_FORMATS))
        raise ValueError(f"kv_format is {kv_format!r}; must be None or one of {allowed}")
    if kv_format in _MISSING_FORMATS:
        raise NotImplementedError(
            f"kv_format {kv_format} ({_MISSING_FORMATS[kv_format]}) is not supported: {_SUPPORTED}"
        )
    if (k_cache.dtype == torch.bfloat16) == is_fp8_kvcache:
        raise ValueError(
            f"is_fp8_kvcache is {is_fp8_kvcache}, but k_cache is {k_cache.dtype}; an FP8 cache holds bytes, and with "
            "is_fp8_kvcache=False the cache is torch.bfloat16"
        )
    if not is_fp8_kvcache:
        return "bf16"
    if kv_format is not None:
        return _FORMAT_NAMES[kv_format]
    if width in (528, 288):
        raise NotImplementedError(
            f"k_cache has {width} bytes a token (V41, or V32_NO_ROPE): not supported; {_SUPPORTED}"
        )
    if width not in _FORMAT_WIDTHS:
        raise ValueError(f"k_cache has {width} bytes a token; must have 656 (V32) or 584 (V4)")
    if width == 656 and q.shape[-1] == 512:
        raise NotImplementedError(
            f"q is 512 wide over rows of 656 bytes, V32_NO_ROPE in the rows of V32: not supported; {_SUPPORTED}"
        )
    return _FORMAT_WIDTHS[width]


def _check_mode(q: torch.Tensor, head_dim_v: int, causal: bool, indices: torch.Tensor | None) -> None:
    if indices is None:
        raise NotImplementedError(f"indices is None, which asks for dense decoding: not supported; {_SUPPORTED}")
    if causal:
        raise ValueError("causal is True; must be False where indices are given, since they say what is attended to")
    if head_dim_v != 512:
        raise ValueError(f"head_dim_v is {head_dim_v}; must be 512")
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}; must be [b, s_q, h_q, d_qk]")


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    head_dim_v: int = 512,
    tile_scheduler_metadata: object = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    kv_format: str | None = None,
    use_legacy: bool | None = None,
    return_log2_lse: bool = False,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decoding attention over a paged cache.

    q [b, s_q, h_q, 576 or 512] bf16; k_cache [pages, page, 1, 656 or 584] bytes, or bf16 [pages, page, 1, 576] with
    is_fp8_kvcache=False, where the device has a kernel for it; indices [b, s_q, topk] slots of the cache. out, if
    given, is written and returned. attn_sink, topk_length and the extra cache (V4) are those of chiasma.decode().

    Returns (out [b, s_q, h_q, 512] bf16, lse [b, h_q, s_q] float32, a transposed view). A row without a valid index has
    out 0 and lse +inf, as in that module; chiasma.decode() itself returns -inf, which merges exactly. return_log2_lse
    gives lse to base 2. enable_batch_invariant: the result of a request does not depend on the others.

    block_table, cache_seqlens, tile_scheduler_metadata, num_splits and use_legacy may be anything. So may descale_q
    and descale_k, which belong to dense FP8 caches: here the scales stand in the cache.
    """
    _check_mode(q, head_dim_v, causal, indices)
    result, lse = chiasma.decode(
        q,
        k_cache,
        indices,
        format=_cache_format(k_cache, q, is_fp8_kvcache, kv_format),
        sm_scale=softmax_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        extra_kv_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
        out=out,
        batch_invariant=enable_batch_invariant,
    )
    # One pass over lse alone, queued like any other operation: nothing waits for the device, and a graph records it.
    torch.nan_to_num_(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)
    if return_log2_lse:
        lse.mul_(_LOG2_E)
    return result, lse.transpose(1, 2)


def flash_mla_sparse_fwd(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill over a bf16 cache. Here only to say so; install() leaves an engine's own in its place."""
    raise NotImplementedError(f"flash_mla_sparse_fwd is sparse prefill over a bf16 cache: not supported; {_SUPPORTED}")
