"""The few instructions of PTX that kernels make numbers of codes with, executed by torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ("execute",)


def halves(x: Tensor, kind: torch.dtype) -> Tensor:
    return x.contiguous().view(kind).unflatten(-1, (-1, 2)).float()


def calculate(operation: str, *operands: Tensor) -> Tensor:
    """Of two numbers in each register: exact in float32, and rounded once."""
    kind = torch.bfloat16 if operation.endswith("bf16x2") else torch.float16
    a, b, *c = (halves(x, kind) for x in torch.broadcast_tensors(*operands))
    y = a + b if operation.startswith("add") else a * b + c[0] if c else a * b
    return y.to(kind).flatten(-2).view(torch.int32)


def in_both_halves(x: Tensor) -> Tensor:
    return x & 0xFFFF | x << 16


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda x: torch.as_tensor(x, dtype=torch.int32),
    "shr.b32": lambda x, bits: (x.long() % 2**32 >> bits).int(),
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[table],
    "prmt.b32": lambda a, _, order: in_both_halves({0x1010: a, 0x3232: a >> 16}[order]),
    "cvt.f32.f16": lambda x: x.contiguous().view(torch.float16).float(),
    "cvt.rn.bf16x2.f32": lambda a, b: in_both_halves(a.bfloat16().view(torch.int16).int()),
    **{
        name: partial(calculate, name) for name in ("fma.rn.bf16x2", "add.rn.f16x2", "mul.rn.f16x2")
    },
}


def execute(code: str, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return what assembly makes of registers int32; halves of them are int16."""
    outputs = 1 + max(int(n) for n in re.findall(r"\$(\d+)", code)) - len(inputs)
    registers: dict[str, Any] = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    for line in re.split(r" *; *", code.strip("{ }")):
        name, *operands = re.split(r"[ ,{}]+", line)
        if name == "mov.b32" and len(operands) == 3:  # a register into its halves
            x = registers[operands[2]]
            registers[operands[0]], registers[operands[1]] = (
                x.to(torch.int16),
                (x >> 16).to(torch.int16),
            )
        elif name and name != ".reg":
            to, *sources = operands
            values = [registers[n] if n in registers else signed(int(n, 0)) for n in sources]
            registers[to] = INSTRUCTIONS[name](*values)
    return tuple(registers[f"${i}"] for i in range(outputs))


def signed(number: int) -> int:
    return number - (number >> 31 << 32)
