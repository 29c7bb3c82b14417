"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from treadle.api.models import ModelContext, SupportsGatedInput
from treadle.errors import UnsupportedModelError
from treadle.layers import ops
from treadle.layers.linear import Linear

__all__ = ("GatedMLP", "gated_activation")

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": ops.silu_and_mul,
        "swish": ops.silu_and_mul,
        "gelu": ops.gelu_mul,
        "gelu_tanh": ops.gelu_tanh_mul,
        "gelu_pytorch_tanh": ops.gelu_tanh_mul,
        "gelu_new": ops.gelu_tanh_mul,
        "gelu_fast": ops.gelu_tanh_mul,
        "relu2": ops.relu_squared_mul,
    }
)


def gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """``[..., 2 · n] -> [..., n]`` for a ``hidden_act`` of a configuration."""
    try:
        return ACTIVATIONS[name]
    except KeyError:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(
            f"the configuration says hidden_act {name!r}; treadle's gated layers know {known}"
        ) from None


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
        self.fused: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        """``linear_silu_and_mul``."""

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hidden] -> [tokens, hidden]
        inner = self.gate_up_proj
        if self.fused is not None:
            h = self.fused(x, inner.get_parameter("weight"), inner.bias)
        elif self.fuses_down_proj:
            return self.down_proj.gated(inner(x))
        else:
            h = self.op(inner(x))
        y: Tensor = self.down_proj(h)
        return y
