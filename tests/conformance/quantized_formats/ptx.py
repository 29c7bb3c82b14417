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
    if operation.startswith(("add", "sub")):
        y = a + b if operation.startswith("add") else a - b
    else:  # a product of floats of 16 bits is exact in float64, and so is a sum with one
        y = a.double() * b.double() + (c[0].double() if c else 0)
    return y.to(kind).flatten(-2).view(torch.int32)


def in_both_halves(x: Tensor) -> Tensor:
    return x & 0xFFFF | x << 16


def permuted(a: Tensor, b: Tensor, order: Tensor) -> Tensor:
    """Each byte of the result from the eight of both, by selectors of four bits, without the sign's."""
    a, b, order = torch.broadcast_tensors(a, b, order)
    pool = torch.stack([x >> shift & 0xFF for x in (a, b) for shift in (0, 8, 16, 24)])
    picked = [pool.gather(0, (order >> 4 * i & 7).long()[None])[0] << 8 * i for i in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def rounded_twice(kind: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """float32 in a register to ``kind`` in both halves of one; ``a`` and ``b`` are the same."""
    number = a if a.dtype is torch.float32 else a.contiguous().view(torch.float32)
    return in_both_halves(number.to(kind).view(torch.int16).int())


def shifted_right(x: Tensor, bits: Tensor) -> Tensor:
    return (x.long() % 2**32 >> bits).int()


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda x: torch.as_tensor(x, dtype=torch.int32),
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda x, bits: x << bits,
    "shr.b32": shifted_right,
    "shr.u32": shifted_right,
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c, 0x6A: a & b ^ c}[table],
    "prmt.b32": lambda *operands: permuted(
        *(torch.as_tensor(x, dtype=torch.int32) for x in operands)
    ),
    "cvt.f32.f16": lambda x: x.contiguous().view(torch.float16).float(),
    "cvt.rn.bf16x2.f32": partial(rounded_twice, torch.bfloat16),
    "cvt.rn.f16x2.f32": partial(rounded_twice, torch.float16),
    **{
        f"{operation}.rn.{kind}": partial(calculate, f"{operation}.rn.{kind}")
        for operation in ("fma", "add", "sub", "mul")
        for kind in ("bf16x2", "f16x2")
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
