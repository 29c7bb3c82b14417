"""The usual attention block: projections, rotary embedding, attention, output projection."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from treadle.api.attention import ForwardContext
from treadle.api.models import ModelContext
from treadle_layers_kit.attention import Attention
from treadle_layers_kit.fused_rope import rope_site
from treadle_layers_kit.fusion import Site
from treadle_layers_kit.linear import Linear, QKVLinear
from treadle_layers_kit.rotary import CosSin, RotaryEmbedding
from treadle_layers_kit.weight import WeightTarget

__all__ = ("SelfAttention", "cache_scale")

# Writers of checkpoints name the scales of an fp8 cache after the block, after the projection that
# makes what is cached, or after its output; one ``kv_scale`` is meant for both.
CACHE_SCALE = re.compile(
    r"(?:(?:attn|k_proj|v_proj|qkv_proj)\.)?(?P<kind>k|v|kv)_scale|(?P<output>k|v)_proj\.output_scale"
)


def cache_scale(suffix: str, parameter: str) -> WeightTarget | None:
    """The slot in ``parameter``, the ``kv_scale`` of an ``Attention``, of a checkpoint's scale.

    ``suffix`` is the tensor's name below the attention block; ``None`` for what is no scale.
    """
    match = CACHE_SCALE.fullmatch(suffix)
    if match is None:
        return None
    kind = match["kind"] or match["output"]
    return WeightTarget(parameter, {"k": 0, "v": 1, "kv": None}[kind])


class SelfAttention(nn.Module):
    """``[tokens, hidden] -> [tokens, hidden]``.

    ``norm`` makes the normalisation over the features of each head that some models apply to
    queries and keys. ``bias`` is that of q, k and v, ``output_bias`` that of the output projection.
    The other options are those of ``Attention``.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        rotary: RotaryEmbedding,
        *,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        bias: bool = False,
        output_bias: bool = False,
        norm: Callable[[], nn.Module] | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(
            ctx, f"{prefix}.qkv_proj", hidden_size, heads, kv_heads, head_size, bias=bias
        )
        self.o_proj = Linear(
            ctx, f"{prefix}.o_proj", heads * head_size, hidden_size, bias=output_bias, split="row"
        )
        self.q_norm = norm() if norm else None
        self.k_norm = norm() if norm else None
        self.rotary = rotary
        self.attn = Attention(
            ctx,
            f"{prefix}.attn",
            heads,
            kv_heads,
            head_size,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        self.fused: Callable[..., Tensor] | None = None
        """``rope_and_cache``, as ``FusedRope`` calls it."""

    def locate(self, suffix: str) -> WeightTarget | None:
        """The slot of a scale of the cache, under any name that checkpoints give it, and of the sinks."""
        if suffix == "sinks" and self.attn.sinks is not None:
            return WeightTarget("attn.sinks")
        return cache_scale(suffix, "attn.kv_scale")

    def kernel_sites(self, path: str) -> Iterator[Site]:
        yield rope_site(self, path)

    def forward(self, x: Tensor, angles: CosSin, forward_ctx: ForwardContext) -> Tensor:
        if self.fused is not None:
            q = self.fused(self.qkv_proj.packed(x), angles, self.attn, forward_ctx)
            fused: Tensor = self.o_proj(self.attn(q, None, None, forward_ctx))
            return fused
        q, k, v = self.qkv_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, k, angles)
        y: Tensor = self.o_proj(self.attn(q, k, v, forward_ctx))
        return y
