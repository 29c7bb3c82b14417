"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import ModelContext, SupportsGatedInput
from treadle.errors import UnsupportedModelError
from treadle_layers_kit import ops
from treadle_layers_kit.fusion import Kernel, Site
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.linear import Linear
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.plain import PlainLinear

__all__ = (
    "ClampedSwiGLU",
    "GatedMLP",
    "gated_activation",
    "gelu_mul",
    "gelu_tanh_mul",
    "relu_squared_mul",
)


def gelu_mul(x: Tensor) -> Tensor:  # [..., 2 · n] -> [..., n]
    """``gelu(gate) · up`` of ``x = [gate, up]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_mul(x: Tensor) -> Tensor:  # [..., 2 · n] -> [..., n]
    """``gelu(gate) · up`` with the tanh approximation."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def relu_squared_mul(x: Tensor) -> Tensor:  # [..., 2 · n] -> [..., n]
    """``relu(gate)² · up`` of ``x = [gate, up]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.relu(gate).square() * up


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": ops.silu_and_mul,
        "swish": ops.silu_and_mul,
        "gelu": gelu_mul,
        "gelu_tanh": gelu_tanh_mul,
        "gelu_pytorch_tanh": gelu_tanh_mul,
        "gelu_new": gelu_tanh_mul,
        "gelu_fast": gelu_tanh_mul,
        "relu2": relu_squared_mul,
    }
)


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """``[..., 2 · n] -> [..., n]`` for a ``hidden_act`` of a configuration."""
    try:
        return ACTIVATIONS[name]
    except KeyError:
        supported = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(
            f"the configuration says hidden_act {name!r}; treadle's gated layers know {supported}"
        ) from None


class ClampedSwiGLU:
    """``ops.clamped_swiglu`` with the numbers of a configuration."""

    def __init__(self, alpha: float, limit: float) -> None:
        self.alpha, self.limit = alpha, limit
        self.op: Callable[[Tensor, float, float], Tensor] = ops.clamped_swiglu

    def __call__(self, x: Tensor) -> Tensor:  # [..., 2 · n] -> [..., n]
        return self.op(x, self.alpha, self.limit)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) · up(x))``; gate and up are one matrix."""

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            ctx,
            f"{prefix}.gate_up_proj",
            hidden_size,
            (intermediate_size, intermediate_size),
            bias=bias,
            split="column",
            names=("gate_proj", "up_proj"),
        )
        self.down_proj = Linear(
            ctx,
            f"{prefix}.down_proj",
            intermediate_size,
            hidden_size,
            bias=bias,
            split="row",
            reduce=reduce,
        )
        self.op = gated_activation(activation)
        self.fuses_down_proj = self.op is ops.silu_and_mul and isinstance(
            self.down_proj.method, SupportsGatedInput
        )
        """Whether ``down_proj`` computes the activation too."""
        self.fused: Callable[[Tensor], Tensor] | None = None
        """``gate_up_proj`` and ``op`` in one kernel."""

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hidden] -> [tokens, hidden]
        gate_up = self.gate_up_proj
        if self.fused is not None:
            h = self.fused(x)
        elif self.fuses_down_proj:
            return self.down_proj.gated(gate_up(x))
        else:
            h = self.op(gate_up(x))
        y: Tensor = self.down_proj(h)
        return y

    def kernel_sites(self, path: str) -> Iterator[Site]:
        gate_up, fused = self.gate_up_proj, ("linear_silu_and_mul",)
        if self.op is not ops.silu_and_mul:
            yield Site(path, fused, reason="its activation is not silu")
            return
        size = {"size": gate_up.out_features // 2}
        yield Site(path, ("silu_and_mul",), (size,), partial(setattr, self, "op"))
        packed = gate_up.packed_weight
        if isinstance(gate_up.method, PlainLinear):
            yield Site(path, fused, (gate_up.sizes,), self._fuse, fuses=True)
        elif packed is not None and not self.fuses_down_proj:
            fused = (f"{packed.OP}_silu_and_mul",)
            yield Site(path, fused, (packed.sizes,), partial(self._fuse_packed, packed), fuses=True)
        else:
            yield Site(path, fused, reason="gate_up_proj is quantized")

    def _fuse(self, kernel: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        gate_up = self.gate_up_proj
        self.fused = lambda x: kernel(x, gate_up.get_parameter("weight"), gate_up.bias)

    def _fuse_packed(self, packed: PackedInt4 | PackedWeight, kernel: Kernel) -> None:
        self.fused = partial(packed.multiply, op=kernel)
