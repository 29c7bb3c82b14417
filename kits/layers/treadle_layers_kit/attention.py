"""The attention layer: what a model says about attention, without saying how it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.attention import AttentionRequest, ForwardContext, MaskKind
from treadle.api.cache import KVCacheSpec
from treadle.api.devices import device_info, dtype_name
from treadle.api.models import ModelContext
from treadle_layers_kit.collective import shard_heads
from treadle_layers_kit.weight import Shard, empty_weight, set_shards

__all__ = ("Attention",)


class Attention(nn.Module):
    """Attention over everything that the sequence has in the cache.

    ``heads`` and ``kv_heads`` are those of the whole model. ``window`` counts the tokens that a
    token sees, itself included. The runner sets ``cache`` (this layer's pages) and ``attn_group``
    (its index in ``ForwardContext.attn_metadata``) once, before the first step.

    ``scales`` are those of the keys and values of a cache in fp8: numbers on the host, fixed before
    graphs are captured, so that a kernel gets them as arguments. ``process_weights_after_loading`` takes them from
    ``kv_scale``, which the checkpoint fills. ``sinks`` is a logit of each head that takes its share of the
    softmax and has no value.
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
        q, kv = shard_heads(ctx.tp_group, heads, kv_heads, head_size)
        dtype = dtype_name(ctx.dtype)
        kv_dtype = ctx.quantization.kv_cache_dtype(prefix) if ctx.quantization else None
        if window is not None and ctx.max_model_len is not None and ctx.max_model_len <= window:
            window = None  # no sequence is long enough to slide, and full attention is simpler
        if window is not None and mask is MaskKind.CAUSAL:
            mask = MaskKind.SLIDING
        self.request = AttentionRequest(
            device=device_info(ctx.device),
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            head_size=head_size,
            num_heads=q.size // head_size,
            num_kv_heads=kv.size // head_size,
            scale=head_size**-0.5 if scale is None else scale,
            mask=mask,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        self.spec = KVCacheSpec(
            layer=prefix,
            num_kv_heads=kv.size // head_size,
            head_size=head_size,
            dtype=kv_dtype or dtype,
            window=window,
            kind="full" if window is None else "sliding",
        )
        self.backend = ctx.register_attention(self.request, self.spec)
        self._forward_into: Callable[..., None] | None = getattr(self.backend, "forward_into", None)
        self.cache = torch.empty(0)
        self.attn_group = 0
        self.scales = (1.0, 1.0)
        self.sinks: Tensor | None = None
        if sinks:
            heads_here = [self.request.num_heads]
            self.sinks = empty_weight(
                heads_here, torch.float32, output_dim=0, output_block=head_size
            )
            set_shards([self.sinks], (q,), None)
        self.kv_scale = empty_weight([2], torch.float32, per_part=True, default=1.0)
        set_shards([self.kv_scale], (Shard.full(1), Shard.full(1)), None)

    def process_weights_after_loading(self) -> None:
        """Called once by the loader, which has checked that the scales are positive."""
        key, value = self.kv_scale.tolist()
        self.scales = (key, value)

    @property
    def is_fp8_cache(self) -> bool:
        """Whether the cache is in fp8, so that ``scales`` matter."""
        return self.cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, forward_ctx: ForwardContext
    ) -> Tensor:
        """``[tokens, heads, head_size]`` queries to ``[tokens, heads · head_size]``.

        The arguments may be views whose tokens lie further apart than their sizes say. ``k`` and
        ``v`` are ``None`` where a fused kernel has written them already.
        """
        if forward_ctx.attend is not None:
            return forward_ctx.attend(self, q, k, v)
        return self.attend(q, k, v, forward_ctx.attn_metadata[self.attn_group])

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        plan: Any,
        out: Tensor | None = None,
    ) -> Tensor:
        """``forward`` with the metadata of this layer's group. The result is written to ``out``, if there is one."""
        scales = (self.scales,) if self.is_fp8_cache else ()
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        arguments = (q, k, v, self.cache, plan, *scales)
        if out is not None and self._forward_into is not None:
            self._forward_into(out.view(q.shape), *arguments, **sinks)
            return out
        forward: Callable[..., Tensor] = self.backend.forward
        result = forward(*arguments, **sinks).flatten(-2)
        return result if out is None else out.copy_(result)

    def extra_repr(self) -> str:
        request = self.request
        return f"heads={request.num_heads}, kv_heads={request.num_kv_heads}, head_size={request.head_size}, window={request.window}"
