"""Arguments for the declared operations: random numbers where they will do, by name elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from treadle.sampling.blocks import Blocks
from treadle.sampling.noise import keys
from treadle_layers_kit.kernel_op import Arg, Example, KernelOp, Sizes

__all__ = ("copied", "example_args")


def example_args(
    op: KernelOp, sizes: Sizes, dtype: torch.dtype, seed: int, *, optional: bool = True
) -> list[Any]:
    """Return arguments on the CPU; ``sizes`` are those of a request and ``rows``.

    Without ``optional``, arguments that may be ``None`` are.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        None
        if arg.optional and not optional
        else _example(arg, op.examples, sizes, dtype, generator)
        for arg in op.args
    ]


def copied(args: Sequence[Any]) -> list[Any]:
    """Return arguments with their tensors cloned."""
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


def _example(
    arg: Arg,
    overrides: Mapping[str, Example],
    sizes: Sizes,
    dtype: torch.dtype,
    generator: Generator,
) -> Any:
    if arg.name in overrides:
        return overrides[arg.name](sizes, dtype, generator)
    if arg.name in EXAMPLES and not (arg.name == "cache" and arg.dtype == "dtype"):
        return EXAMPLES[arg.name](sizes, dtype, generator)
    if arg.shape is None:
        return sizes[arg.value] if isinstance(arg.value, str) else arg.value
    shape = [evaluate(size, sizes) for size in arg.shape.split(",")]
    numbers = torch.randn(shape, generator=generator) * SCALES.get(arg.shape, 1.0)
    return numbers.to(dtype if arg.dtype == "dtype" else getattr(torch, arg.dtype))


def evaluate(expression: str, sizes: Sizes) -> int:
    """Return the value of sums of products of sizes and numbers, ``"heads + 2 * kv_heads"``."""
    if expression.strip() == "...":
        return sizes["rows"]
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            name = factor.strip()
            product *= int(name) if re.fullmatch(r"\d+", name) else sizes[name]
        total += product
    return total


SCALES = {"..., in_features": 0.125, "rows, vocab_size": 3.0}
"""Results of about one, and distributions with peaks."""


def _cos(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    cos = _angles(sizes).cos()
    return torch.cat((cos, cos), -1).to(dtype)


def _sin(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    sin = _angles(sizes).sin()
    return torch.cat((-sin, sin), -1).to(dtype)


def _angles(sizes: Sizes) -> Tensor:
    # Cosine and sine are two arguments of the same angles, which therefore need their own seed.
    generator = torch.Generator().manual_seed(sizes["rows"])
    return torch.randn(sizes["rows"], 1, sizes["head_size"] // 2, generator=generator)


def _norms(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> tuple[Any, ...]:
    q, k = torch.randn(2, sizes["head_size"], generator=generator).to(dtype)
    return q.clone(), k.clone(), 1e-6, 0.0


def _slots(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    slots = torch.randperm(sizes["slots"], generator=generator)[: sizes["rows"]]
    if len(slots) > 1:
        slots[1] = -1  # a token that is stored nowhere
    return slots


def _fp8_cache(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    shape = (2, sizes["slots"], sizes["kv_heads"], sizes["head_size"])
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def _keys(first: int) -> Example:
    def example(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
        return torch.tensor([keys(7919 * row)[first : first + 2] for row in range(sizes["rows"])])

    return example


def _width(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> int:
    return Blocks.of(sizes["vocab_size"], torch.device("cpu")).width


EXAMPLES: Mapping[str, Example] = {
    "cos": _cos,
    "sin": _sin,
    "norms": _norms,
    "slots": _slots,
    "cache": _fp8_cache,
    "scales": lambda sizes, dtype, generator: (0.5, 0.25),
    "width": _width,
    "temperature": lambda sizes, dtype, generator: (
        torch.rand(sizes["rows"], generator=generator) + 0.3
    ),
    "greedy": lambda sizes, dtype, generator: (torch.arange(sizes["rows"]) % 3 == 1).int(),
    "offsets": _keys(0),
    "strides": _keys(2),
    "positions": lambda sizes, dtype, generator: torch.arange(sizes["rows"]) + 5,
}
"""Arguments that random numbers do not make, by name; ``cache`` is that in fp8."""
