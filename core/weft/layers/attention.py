"""The attention layer: what a model says about attention, without saying how it is done."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.api.attention import AttentionRequest, MaskKind, Step
from weft.api.cache import LayerCacheSpec
from weft.api.models import ModelContext
from weft.layers.collective import divide_heads
from weft.layers.device import device_info, dtype_name

__all__ = ("Attention",)


class Attention(nn.Module):
    """Attention over everything that the sequence has in the cache.

    ``heads`` and ``kv_heads`` are those of the whole model. ``window`` counts the tokens that a
    token sees, itself included. The runner sets ``cache`` (this layer's pages) and ``group``
    (its index in ``Step.plans``) once, before the first step.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        heads: int,
        kv_heads: int,
        head_size: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        mask: MaskKind = MaskKind.CAUSAL,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        q, kv = divide_heads(ctx.ranks, heads, kv_heads, head_size)
        dtype = dtype_name(ctx.dtype)
        kv_dtype = ctx.quantization.kv_dtype(prefix) if ctx.quantization else None
        if window is not None and ctx.max_model_len is not None and ctx.max_model_len <= window:
            window = None  # no sequence is long enough to slide, and full attention is simpler
        if window is not None and mask is MaskKind.CAUSAL:
            mask = MaskKind.SLIDING
        self.request = AttentionRequest(
            device=device_info(ctx.device),
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            head_size=head_size,
            heads=q.size // head_size,
            kv_heads=kv.size // head_size,
            scale=head_size**-0.5 if scale is None else scale,
            mask=mask,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        self.spec = LayerCacheSpec(
            layer=prefix,
            kv_heads=kv.size // head_size,
            head_size=head_size,
            dtype=kv_dtype or dtype,
            window=window,
            kind="full" if window is None else "sliding",
        )
        self.backend = ctx.attention(self.request, self.spec)
        self.cache = torch.empty(0)
        self.group = 0

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, step: Step) -> Tensor:
        """``[tokens, heads, head_size]`` queries to ``[tokens, heads · head_size]``.

        The arguments may be views whose tokens lie further apart than their sizes say. ``k`` and
        ``v`` are ``None`` where a fused kernel has written them already.
        """
        out = self.backend.forward(q, k, v, self.cache, step.plans[self.group])
        return out.flatten(-2)

    def extra_repr(self) -> str:
        r = self.request
        return f"heads={r.heads}, kv_heads={r.kv_heads}, head_size={r.head_size}, window={r.window}"
