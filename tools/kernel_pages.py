"""The generated lists of operations in docs/ref/plugins/kernel_ops.md and communicators.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treadle.testing.kernel_ops import COMMUNICATOR_OPS, KERNEL_OPS
from treadle_layers_kit.kernel_op import Arg, KernelOp

__all__ = ("BLOCKS",)


def kernel_ops() -> str:
    """The operations that kernel plugins may offer."""
    return _listed(KERNEL_OPS.values())


def communicator_ops() -> str:
    """The fused operations of communicators."""
    return _listed(COMMUNICATOR_OPS.values())


def _listed(operations: Iterable[KernelOp]) -> str:
    return "\n" + "\n".join(map(_described, operations)) + "\n"


def _described(op: KernelOp) -> str:
    sizes = ", ".join(f"`{name}`" for name in op.small_sizes)
    tensors = [_argument(arg) for arg in (*op.args, *op.returns) if arg.shape is not None]
    lines = [
        f"`{op.name}`: `{_signature(op)}`",
        f":   {' '.join(op.about.split())}",
        f"    Sizes: {sizes}. Used by `{op.used_by}`. {'; '.join(f'`{text}`' for text in tensors)}.",
    ]
    return "\n".join(lines) + "\n"


def _signature(op: KernelOp) -> str:
    """``f(x, weight, eps, offset) -> y``."""
    results = ", ".join(arg.name for arg in op.returns)
    results = f"({results})" if len(op.returns) > 1 else results
    return f"f({', '.join(arg.name for arg in op.args)}) -> {results}"


def _argument(arg: Arg) -> str:
    """Return an argument as the documentation writes it."""
    text = arg.name if arg.shape is None else f"{arg.name} [{arg.shape}]"
    text += "" if arg.dtype == "dtype" else f" {arg.dtype}"
    notes = ["may be None"] * arg.optional + ["rows may be apart"] * arg.strided
    notes += {"read": [], "scratch": ["may be overwritten"], "write": ["written"]}[arg.access]
    notes += ["or float32 partial sums"] * arg.partial
    return f"{text} ({', '.join(notes)})" if notes else text


BLOCKS: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (kernel_ops, communicator_ops)
}
