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
  - Dense decoding, prefill and V41 in 4 bits are missing; each raises NotImplementedError.
  - Rows of 528 bytes need a kv_format, because three layouts have as many; V41_PLANE, V41's older one, is added.
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
    "this module does sparse decoding (indices given) over V32 (656 bytes a token), V4 (584), V32_NO_ROPE (656 or "
    "528), V41 (528), V41_PLANE (528), and bf16 (576 or 512 wide)"
)
# kv_format, and the formats of chiasma.decode() that it means by the bytes of a token. V41_PLANE is this library's own
# word for V41's older layout, with the scales behind a page's rows.
_FORMATS = {
    "V32": {656: "v32"},
    "V4": {584: "v4"},
    "V32_NO_ROPE": {656: "v32nope", 528: "v32nope_compact"},
    "V41": {528: "v41"},
    "V41_PLANE": {528: "v41plane"},
}


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


def _cache_format(k_cache: torch.Tensor, q: torch.Tensor, is_fp8_kvcache: bool, kv_format: str | None) -> str | None:
    """The format for chiasma.decode(); None: it tells itself."""
    width = k_cache.shape[-1] if k_cache.dim() else 0
    if kv_format is not None and kv_format not in _FORMATS:
        raise NotImplementedError(f"kv_format {kv_format!r} is not supported: {_SUPPORTED}")
    if (k_cache.dtype == torch.bfloat16) == is_fp8_kvcache:
        raise ValueError(
            f"is_fp8_kvcache is {is_fp8_kvcache}, but k_cache is {k_cache.dtype}; an FP8 cache holds bytes, and with "
            "is_fp8_kvcache=False the cache is torch.bfloat16"
        )
    if not is_fp8_kvcache:
        return None
    if kv_format is not None:
        return _format_of_width(_FORMATS[kv_format], kv_format, width)
    if width == 528:
        raise ValueError(
            "k_cache has 528 bytes a token, as three layouts do; kv_format must say which: 'V41' (scales in the row), "
            "'V41_PLANE' (scales behind the page's rows) or 'V32_NO_ROPE' (float32 scales)"
        )
    if width == 656 and q.shape[-1] == 512:
        raise ValueError(
            "q is 512 wide and k_cache has 656 bytes a token; V32 has queries of 576, and for rows without RoPE "
            "kv_format must be 'V32_NO_ROPE'"
        )
    if width == 288:
        raise NotImplementedError(f"k_cache has 288 bytes a token (V41 in 4 bits): not supported; {_SUPPORTED}")
    return _format_of_width({656: "v32", 584: "v4"}, None, width)


def _format_of_width(formats: dict[int, str], kv_format: str | None, width: int) -> str:
    # Comparisons, not a lookup: while torch.compile traces, a width may be a symbol.
    for known, name in formats.items():
        if width == known:
            return name
    allowed = " or ".join(str(known) for known in formats)
    raise ValueError(f"k_cache has {width} bytes a token; with kv_format {kv_format} it must have {allowed}")


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

    q [b, s_q, h_q, 576 or 512] bf16; k_cache [pages, page, 1, width] bytes, or bf16 with is_fp8_kvcache=False, where
    the device has a kernel for it; indices [b, s_q, topk] slots of the cache. kv_format: V32 (width 656, q 576), V4
    (584, q 512), V32_NO_ROPE (656 or 528, q 512), V41 or V41_PLANE (528, q 512); None: V32 or V4 by the width. out, if
    given, is written and returned. attn_sink, topk_length and the extra cache (V4, V41, V41_PLANE) are those of
    chiasma.decode().

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
