"""The generated lists of operations in docs/ref/plugins/kernel_ops.md and communicators.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treadle.layers.kernel_op import KernelOp
from treadle.layers.kernel_ops import COMMUNICATOR_OPS
from treadle.sampling.kernels import KERNEL_OPS

__all__ = ("BLOCKS",)


def kernel_ops() -> str:
    """The operations that kernel plugins may offer."""
    return _listed(KERNEL_OPS.values())


def communicator_ops() -> str:
    """The fused operations of communicators."""
    return _listed(COMMUNICATOR_OPS)


def _listed(operations: Iterable[KernelOp]) -> str:
    return "\n" + "\n".join(map(_described, operations)) + "\n"


def _described(op: KernelOp) -> str:
    sizes = ", ".join(f"`{name}`" for name in op.small_sizes)
    tensors = [arg.describe() for arg in (*op.args, *op.returns) if arg.shape is not None]
    lines = [
        f"`{op.name}`: `{op.signature}`",
        f":   {' '.join(op.about.split())}",
        f"    Sizes: {sizes}. Used by `{op.used_by}`. {'; '.join(f'`{text}`' for text in tensors)}.",
    ]
    return "\n".join(lines) + "\n"


BLOCKS: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (kernel_ops, communicator_ops)
}
