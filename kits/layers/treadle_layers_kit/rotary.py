"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treadle.api.models import ModelContext
from treadle_layers_kit import ops
from treadle_layers_kit.rope import frequencies, rope_parameters

__all__ = ("CosSin", "RotaryEmbedding")


class CosSin(NamedTuple):
    """What the positions of one step mean for queries and keys; the same for many layers."""

    cos: Tensor  # [tokens, 1, rotary_size]
    sin: Tensor  # [tokens, 1, rotary_size], negative where the partner is subtracted


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by angles that grow with the position.

    A token's angles depend on its own position and on nothing else in the batch, so cached keys
    stay valid and prefixes can be shared. Scalings that transformers changes with the length of
    the sequence at hand (``dynamic``, ``longrope``) are therefore fixed when the model is built,
    by the longest sequence that the engine admits (``ModelContext.max_model_len``).

    ``parameters`` defaults to the ``rope_parameters`` of the configuration.
    """

    def __init__(
        self,
        ctx: ModelContext,
        head_size: int,
        *,
        parameters: Mapping[str, Any] | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if parameters is None:
            parameters = rope_parameters(ctx.hf_config)
        inv_freq, self.scaling = frequencies(
            parameters,
            head_size,
            max_position_embeddings=getattr(ctx.hf_config, "max_position_embeddings", None),
            max_model_len=ctx.max_model_len,
        )
        self.dtype = ctx.dtype
        self.interleaved = interleaved
        if interleaved:
            signs = torch.tensor([-1.0, 1.0]).repeat(inv_freq.numel())
            inv_freq = inv_freq.repeat_interleave(2)
        else:
            signs = torch.tensor([-1.0, 1.0]).repeat_interleave(inv_freq.numel())
            inv_freq = inv_freq.repeat(2)
        self.inv_freq: Tensor
        self.signs: Tensor
        self.register_buffer("inv_freq", inv_freq.to(ctx.device), persistent=False)
        self.register_buffer("signs", (signs * self.scaling).to(ctx.device), persistent=False)
        self.op = ops.rotary

    def cos_sin(self, positions: Tensor) -> CosSin:
        """The angles of ``[tokens]`` positions: called once for each step, not for each layer."""
        angles = positions[:, None, None] * self.inv_freq
        # Rounded to the model's dtype as they are written: four kernels a step instead of eight.
        cos, sin = (torch.empty_like(angles, dtype=self.dtype) for _ in range(2))
        if self.scaling == 1.0:
            torch.cos(angles, out=cos)
        else:
            torch.mul(angles.cos(), self.scaling, out=cos)
        torch.mul(angles.sin(), self.signs, out=sin)
        return CosSin(cos, sin)

    def forward(self, q: Tensor, k: Tensor, angles: CosSin) -> tuple[Tensor, Tensor]:
        """Turn ``[tokens, heads, head_size]`` queries and keys."""
        return self.op(q, k, angles.cos, angles.sin, self.interleaved)
