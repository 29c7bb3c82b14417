"""Linear layers whose result only a norm reads, and which additions move from the one to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from treadle_layers_kit.fusion import Site
from treadle_layers_kit.linear import Linear
from treadle_layers_kit.norm import RMSNorm
from treadle_layers_kit.plain import PlainLinear

__all__ = ("SPLIT_K", "LinearNormPair", "has_default_forward", "pair_up")

SPLIT_K = ("fused_add_partials_rms_norm", "linear_split_k")
"""The linear layer leaves its last addition to the norm."""


class LinearNormPair(NamedTuple):
    """A linear layer whose result is read by one norm and nothing else, and that norm."""

    path: str
    linear: Linear
    norm: RMSNorm
    selects_rows: bool
    """Whether the last layer selects rows of the result before the norm."""

    def defer_all_reduce(self) -> None:
        """Move the sum over ranks from the linear layer into the norm."""
        if self.linear.reduce_results:
            self.linear.reduce_results, self.norm.tp_group = False, self.linear.tp_group

    def split_k_site(self) -> Site:
        """Return where ``SPLIT_K`` goes, or why the pair cannot have it."""
        linear, norm = self.linear, self.norm
        checks = (
            (not self.selects_rows, "the last layer selects rows before the norm"),
            (norm.tp_group is None and not linear.reduce_results, "the ranks sum before the norm"),
            (linear.bias is None, "the linear layer has a bias"),
            (isinstance(linear.method, PlainLinear), "the linear layer is quantized"),
        )
        if reason := next((reason for is_met, reason in checks if not is_met), ""):
            return Site(self.path, SPLIT_K, reason=reason)

        def install(add: Callable[..., Any], multiply: Callable[..., Any]) -> None:
            method: Any = linear.method
            norm.partials_op, method.op = add, multiply

        return Site(self.path, SPLIT_K, (norm.sizes, linear.sizes), install, fuses=True)


def has_default_forward(module: nn.Module, base: type[nn.Module], *methods: str) -> bool:
    """Return whether ``module`` is an instance of ``base`` whose class overrides neither ``forward``
    nor any of ``methods``."""
    return isinstance(module, base) and all(
        getattr(type(module), name) is getattr(base, name) for name in ("forward", *methods)
    )


def pair_up(
    path: str,
    block: nn.Module,
    base: type[nn.Module],
    linear: str,
    norm: Any,
    *,
    selects_rows: bool,
) -> LinearNormPair | Site | None:
    """Return the pair of the layer that ends ``block`` (its attribute ``linear``) and ``norm``.

    A ``Site`` with the reason if the block is not the usual ``base``; ``None`` if one of the two is
    not the usual layer.
    """
    if not has_default_forward(block, base):
        reason = f"{type(block).__name__} is there, not the usual {base.__name__}"
        return Site(path, SPLIT_K, reason=reason)
    module: Any = getattr(block, linear)
    if not has_default_forward(module, Linear) or not has_default_forward(norm, RMSNorm):
        return None
    return LinearNormPair(f"{path}.{linear}", module, norm, selects_rows)
