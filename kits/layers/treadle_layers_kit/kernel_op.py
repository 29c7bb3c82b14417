"""How an operation that plugins may implement is declared.

The conformance suite, ``treadle doctor``, the documentation and the checks before use follow from the
declarations in ``treadle_layers_kit.kernel_ops`` and ``treadle.testing.kernel_ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

__all__ = ("Arg", "Example", "KernelOp", "Sizes", "scalar", "tensor")

TOLERANCE: Mapping[str, float] = MappingProxyType(
    {"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3}
)
Sizes = Mapping[str, int]
Example = Callable[[Sizes, Any, Any], Any]
"""Makes an argument, given the sizes, the ``torch.dtype`` and a ``torch.Generator``."""


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
    examples: Mapping[str, Example] = MappingProxyType({})
    """For tests: arguments that random numbers do not make, by name."""


def tensor(name: str, shape: str, **options: Any) -> Arg:
    """Declare an argument that is a tensor."""
    return Arg(name=name, shape=shape, **options)


def scalar(name: str, value: float | str | None = None, **options: Any) -> Arg:
    """Declare an argument that is a number, or several values in a tuple."""
    return Arg(name=name, value=value, **options)
