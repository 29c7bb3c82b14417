"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import overload

import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.communicators import Communicator
from treadle.api.models import ModelContext
from treadle_layers_kit import ops
from treadle_layers_kit.collective_ops import (
    SharedKernels,
    collective_op_owner,
    create_collective_op,
)
from treadle_layers_kit.fusion import Site
from treadle_layers_kit.kernel_ops import ALL_REDUCE_ADD_RMS_NORM
from treadle_layers_kit.weight import empty_weight

__all__ = ("LayerNorm", "RMSNorm")


class RMSNorm(nn.Module):
    """RMS normalisation of the last dimension; scaled by ``weight + offset``.

    With a residual it returns ``(norm(x + residual), x + residual)`` and may overwrite both
    arguments. If ``partials_op`` is set, ``x`` may also be partial sums, float32
    ``[partials, rows, size]``, which are added first.
    """

    def __init__(self, ctx: ModelContext, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = empty_weight([size], ctx.dtype)
        self.op = ops.rms_norm
        self.add_op = ops.fused_add_rms_norm
        self.tp_group: Communicator | None = None
        """Set if ``x`` is this rank's summand: it is summed over the ranks before the addition."""
        self.all_reduce_op: Callable[..., tuple[Tensor, Tensor] | None] | None = None
        """``all_reduce_add_rms_norm``; returns ``None`` for arguments that it does not support."""
        self.partials_op: Callable[..., tuple[Tensor, Tensor]] | None = None
        """``fused_add_partials_rms_norm``."""

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.op(x, self.weight, self.eps, self.offset)
        if self.partials_op is not None and x.dim() > residual.dim():
            return self.partials_op(x, residual, self.weight, self.eps, self.offset)
        if self.tp_group is not None:
            if self.all_reduce_op is not None:
                result = self.all_reduce_op(x, residual, self.weight, self.eps, self.offset)
                if result is not None:
                    return result
            x = self.tp_group.all_reduce(x)
        return self.add_op(x, residual, self.weight, self.eps, self.offset)

    @property
    def sizes(self) -> Mapping[str, int]:
        """For the request of a kernel."""
        return {"size": self.weight.shape[0]}

    def kernel_sites(self, path: str) -> Iterator[Site]:
        for op, attribute in (("rms_norm", "op"), ("fused_add_rms_norm", "add_op")):
            yield Site(path, (op,), (self.sizes,), partial(setattr, self, attribute))

    def install_collective_ops(self, shared: SharedKernels) -> Mapping[str, str]:
        """Norms run one after the other, so that all of a size share a kernel and its memory."""
        if self.tp_group is None:
            return {}
        key = len(self.weight), self.weight.dtype
        if key not in shared:
            shared[key] = create_collective_op(
                ALL_REDUCE_ADD_RMS_NORM, self.tp_group, *key, self.weight.device
            )
        self.all_reduce_op = shared[key]
        return collective_op_owner(ALL_REDUCE_ADD_RMS_NORM, self.tp_group, self.all_reduce_op)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Normalisation of mean and variance over the last dimension."""

    def __init__(self, ctx: ModelContext, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_weight([size], ctx.dtype)
        self.bias = empty_weight([size], ctx.dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
