"""One kernel for the head norms, the rotation and the cache write of an attention block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from treadle.api.attention import ForwardContext, SupportsExternalKVWrite
from treadle_layers_kit.attention import Attention
from treadle_layers_kit.fusion import Site
from treadle_layers_kit.norm import RMSNorm
from treadle_layers_kit.rotary import CosSin

if TYPE_CHECKING:
    from treadle_layers_kit.self_attention import SelfAttention

__all__ = ("FusedRope", "rope_site")


class FusedRope:
    """``rope_and_cache`` or ``rope_and_cache_fp8`` with the constant arguments of one block."""

    def __init__(self, block: SelfAttention, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel
        self._norms = None
        if isinstance(block.q_norm, RMSNorm) and isinstance(block.k_norm, RMSNorm):
            q, k = block.q_norm, block.k_norm
            self._norms = (q.weight, k.weight, q.eps, q.offset)

    def __call__(
        self, qkv: Tensor, angles: CosSin, attn: Attention, forward_ctx: ForwardContext
    ) -> Tensor:
        plan = forward_ctx.attn_metadata[attn.attn_group]
        slots = attn.backend.slot_mapping(plan)  # type: ignore[attr-defined]
        cache = attn.cache.view(2, -1, *attn.cache.shape[-2:])
        scales = (attn.scales,) if attn.is_fp8_cache else ()
        return self._kernel(qkv, angles.cos, angles.sin, self._norms, cache, slots, *scales)


def rope_site(block: SelfAttention, path: str) -> Site:
    """Return where the kernel goes, or why the block cannot have it."""
    ops = ("rope_and_cache_fp8" if block.attn.is_fp8_cache else "rope_and_cache",)
    if reason := _unsupported_reason(block):
        return Site(path, ops, reason=reason)
    request = block.attn.request
    sizes = {
        "heads": request.num_heads,
        "kv_heads": request.num_kv_heads,
        "head_size": request.head_size,
    }

    def install(kernel: Callable[..., Tensor]) -> None:
        block.fused = FusedRope(block, kernel)

    return Site(path, ops, (sizes,), install, fuses=True)


def _unsupported_reason(block: SelfAttention) -> str:
    norms, attn, rotary = (block.q_norm, block.k_norm), block.attn, block.rotary
    checks = (
        (
            norms == (None, None) or all(isinstance(norm, RMSNorm) for norm in norms),
            "queries or keys have norms other than RMSNorm",
        ),
        (not rotary.interleaved, "rotated pairs are interleaved"),
        (rotary.inv_freq.numel() == attn.request.head_size, "only a part of each head is rotated"),
        (
            isinstance(attn.backend, SupportsExternalKVWrite),
            "the attention backend writes its cache itself",
        ),
        (
            attn.is_fp8_cache or attn.cache.dtype == rotary.dtype,
            "the cache has another dtype than the model",
        ),
    )
    return next((reason for is_met, reason in checks if not is_met), "")
