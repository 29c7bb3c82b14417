"""How an operation that plugins may implement is declared.

The conformance suite, ``treadle doctor``, the documentation and the checks before use follow from the
declarations in ``treadle.layers.kernel_ops`` and ``treadle.sampling.kernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

__all__ = ("Arg", "KernelOp", "scalar", "tensor")

TOLERANCE: Mapping[str, float] = MappingProxyType(
    {"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3}
)


class Arg(msgspec.Struct, frozen=True, kw_only=True):
    """One argument or result of an operation."""

    name: str
    shape: str | None = None
    """Symbolic sizes, ``"rows, 2 * size"``; ``...`` is any number of leading dimensions. ``None`` if it
    is not one tensor."""
    dtype: str = "dtype"
    """The name of a torch type; ``dtype`` is that of the request."""
    access: Literal["read", "scratch", "write"] = "read"
    """``scratch``: the operation may overwrite it; ``write``: it is a result, in place."""
    strided: bool = False
    """Whether rows may be further apart than they are long; else the tensor is contiguous."""
    optional: bool = False
    """Whether it may be ``None``."""
    partial: bool = False
    """Of a result: unless an optional argument is given, float32 ``[partials, rows, n]`` may come
    instead, whose sum is the result before it is rounded."""
    exact: bool = False
    """Of a result: with whole numbers nothing is rounded."""
    value: float | str | None = None
    """Of a scalar, for tests: a number, or the name of a size."""

    def describe(self) -> str:
        """Return the argument as the documentation writes it."""
        text = self.name if self.shape is None else f"{self.name} [{self.shape}]"
        text += "" if self.dtype == "dtype" else f" {self.dtype}"
        marks = ["may be None"] * self.optional + ["rows may be apart"] * self.strided
        marks += {"read": [], "scratch": ["may be overwritten"], "write": ["written"]}[self.access]
        marks += ["or float32 partial sums"] * self.partial
        return f"{text} ({', '.join(marks)})" if marks else text


class KernelOp(msgspec.Struct, frozen=True, kw_only=True):
    """An operation: how it is called, what it computes, and where it is used."""

    name: str
    about: str
    """What it computes, in one or two sentences."""
    used_by: str
    """The attribute that holds the kernel, ``RMSNorm.op``."""
    args: tuple[Arg, ...]
    returns: tuple[Arg, ...]
    reference: Callable[..., Any]
    """The operation in plain torch."""
    example_sizes: Mapping[str, int]
    """Sizes of an 8B model, by the names in ``KernelRequest.shape``."""
    small_sizes: Mapping[str, int]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    tolerance: Mapping[str, float] = TOLERANCE

    @property
    def signature(self) -> str:
        """``f(x, weight, eps, offset) -> y``."""
        results = ", ".join(arg.name for arg in self.returns)
        results = f"({results})" if len(self.returns) > 1 else results
        return f"f({', '.join(arg.name for arg in self.args)}) -> {results}"


def tensor(name: str, shape: str, **options: Any) -> Arg:
    """Declare an argument that is a tensor."""
    return Arg(name=name, shape=shape, **options)


def scalar(name: str, value: float | str | None = None, **options: Any) -> Arg:
    """Declare an argument that is a number, or several values in a tuple."""
    return Arg(name=name, value=value, **options)
