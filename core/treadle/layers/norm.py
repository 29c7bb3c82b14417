"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import Collective, ModelContext
from treadle.layers import ops
from treadle.layers.weight import weight

__all__ = ("LayerNorm", "RMSNorm")


class RMSNorm(nn.Module):
    """RMS normalisation of the last dimension; scaled by ``weight + offset``.

    With a residual it returns ``(norm(x + residual), x + residual)`` and may overwrite both
    arguments. Where ``parts_op`` is set, ``x`` may come in parts, float32 ``[parts, rows, size]``, which
    are added first.
    """

    def __init__(self, ctx: ModelContext, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = weight([size], ctx.dtype)
        self.op = ops.rms_norm
        self.add_op = ops.fused_add_rms_norm
        self.ranks: Collective | None = None
        """Set where ``x`` is this rank's part of a sum, which is then made before the addition."""
        self.sum_op: Callable[..., tuple[Tensor, Tensor] | None] | None = None
        """Sum and all that follows in one, for what fits; see ``treadle.layers.collective_ops``."""
        self.parts_op: Callable[..., tuple[Tensor, Tensor]] | None = None
        """``fused_add_partials_rms_norm`` of ``treadle.layers.kernels``."""

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.op(x, self.weight, self.eps, self.offset)
        if self.parts_op is not None and x.dim() > residual.dim():
            return self.parts_op(x, residual, self.weight, self.eps, self.offset)
        if self.ranks is not None:
            if self.sum_op is not None:
                done = self.sum_op(x, residual, self.weight, self.eps, self.offset)
                if done is not None:
                    return done
            x = self.ranks.all_reduce(x)
        return self.add_op(x, residual, self.weight, self.eps, self.offset)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Normalisation of mean and variance over the last dimension."""

    def __init__(self, ctx: ModelContext, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = weight([size], ctx.dtype)
        self.bias = weight([size], ctx.dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
