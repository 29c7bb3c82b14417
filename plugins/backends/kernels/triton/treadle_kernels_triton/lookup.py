"""Codes become numbers of 16 bits by a few instructions, two words at a time.

Four-bit codes do so by a table that lies in the instructions.

A byte permutation takes each byte of its result from eight bytes, by selectors of four bits: a word of four
codes is such a list of selectors. Two permutations look up the lower and the upper eight levels, a third
chooses, and that twice, for both bytes of a number; eight codes cost 25 instructions. Levels that count up
need no table: under the bits of 128 (in float16 1024) a code adds its value, and 11 instructions do for eight.

Bytes get the exponent of a number that has room for them below: what they add to it is their value. The fields
of float8_e4m3fn are shifted into those of a wider number, whose exponent is then too small by a constant. Those
of float4_e2m1 too, where a multiplication by the scale follows anyway: 19 instructions for 8 codes.
"""

from __future__ import annotations

from functools import cache

import torch

from treadle_layers_kit.packed_layout import FP8, Levels

__all__ = ("assembly", "folded_power")

PERMUTE = "prmt.b32"
BASES = {torch.bfloat16: 128.0, torch.float16: 1024.0}
"""Below the bits of such a number a code adds its value."""


def sixteen_bits(levels: tuple[float, ...], dtype: torch.dtype) -> list[int]:
    """The bits of the levels in ``dtype``."""
    return [n & 0xFFFF for n in torch.tensor(levels).to(dtype).view(torch.int16).tolist()]


@cache
def assembly(levels: Levels, dtype: torch.dtype, fold: bool = False) -> str:
    """What makes numbers of ``dtype`` from two words, for each place the numbers of both.

    The words are the operand after the results. ``fold``, of float4_e2m1: behind it are the scales of the four places,
    each twice, and what comes is too small by ``folded_power``, as what is to be multiplied by it.
    """
    if fold:
        return "{ .reg .b32 a, b; " + " ".join(_scaled_e2m1(dtype is torch.bfloat16)) + " }"
    if isinstance(levels, str):
        lines = (_floats if levels == FP8 else _integers)(dtype is torch.bfloat16)
        return "{ .reg .b32 w, a, b, c; " + " ".join(lines) + " }"
    counts_up = levels == tuple(levels[0] + code for code in range(16))
    if counts_up and (-levels[0] in range(17) or levels[0] == BASES[dtype]):
        return "{ .reg .b32 a, b, c; " + " ".join(_counted(levels[0], dtype)) + " }"
    return _lookup(levels, dtype)


def folded_power(dtype: torch.dtype) -> float:
    """The square root of what the exponents of ``dtype`` are larger by than those of float4_e2m1.

    Scales get one half of the difference, so that they stay in range, and sums the other.
    """
    return 2.0**63 if dtype is torch.bfloat16 else 2.0**7


def _scaled_e2m1(is_bf16: bool) -> list[str]:
    """Sign, exponent and fraction in their places, times the scale, which corrects half of the exponent."""
    lines = []
    fields = 6 if is_bf16 else 9  # the place of the fraction
    for place in range(4):
        lower, upper = fields - 4 * place, 12 - 4 * place
        shift = f"shl.b32 a, $4, {lower};" if lower > 0 else f"shr.u32 a, $4, {-lower};"
        lines += [
            shift,
            f"and.b32 a, a, 0x{0x00010001 * (7 << fields):08x};",
            f"shl.b32 b, $4, {upper};",
            f"lop3.b32 ${place}, b, 0x80008000, a, 0xea;",
        ]
        if is_bf16:  # which can only be multiplied and added before capability 9
            lines.append(
                f"mov.b32 b, 0x80008000; fma.rn.bf16x2 ${place}, ${place}, ${5 + place}, b;"
            )
        else:
            lines.append(f"mul.rn.f16x2 ${place}, ${place}, ${5 + place};")
    return lines


def _counted(first: float, dtype: torch.dtype) -> list[str]:
    """From two words in ``$4`` what ``_lookup`` makes of levels that count up from ``first``."""
    base = BASES[dtype]
    under, less = (0x00010001 * n for n in sixteen_bits((base, first - base), dtype))
    lines = [f"mov.b32 c, 0x{less:08x};"]
    if dtype is torch.bfloat16:  # which can only be multiplied and added before capability 9
        lines.append("mov.b32 b, 0x3f803f80;")
    for place in range(4):
        if place:
            lines.append(f"shr.b32 a, $4, {4 * place};")
        source, to = "a" if place else "$4", f"${place}" if first == base else "a"
        lines.append(f"lop3.b32 {to}, {source}, 0x000f000f, 0x{under:08x}, 0xea;")
        if first == base:
            continue
        is_bf16 = dtype is torch.bfloat16
        lines.append(
            f"fma.rn.bf16x2 ${place}, a, b, c;" if is_bf16 else f"add.rn.f16x2 ${place}, a, c;"
        )
    return lines


def _integers(is_bf16: bool) -> list[str]:
    """int8 from the low and the high bytes of ``$2``."""
    lines = []
    for place in (0, 1):
        lines.append(f"shr.u32 w, $2, {8 * place};")
        if is_bf16:  # 128 and seven bits, less 128, or 256 for what is negative
            lines += [
                "lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea;",
                "lop3.b32 b, w, 0x00800080, 0x43004300, 0xea;",
                "mov.b32 c, 0xbf80bf80;",
                f"fma.rn.bf16x2 ${place}, b, c, a;",
            ]
        else:  # 1024 and a byte whose sign is turned, less 1152
            lines += [
                "lop3.b32 a, w, 0x00ff00ff, 0x64806480, 0x6a;",
                "mov.b32 c, 0x64806480;",
                f"sub.rn.f16x2 ${place}, a, c;",
            ]
    return lines


def _floats(is_bf16: bool) -> list[str]:
    """float8_e4m3fn from the low and the high bytes of ``$2``."""
    lines = []
    # Where the fields lie in the high byte's number, and how far that is from where they belong.
    shift, power = (4, "0x7b807b80") if is_bf16 else (1, "0x5c005c00")
    mask = "0x07f007f0" if is_bf16 else "0x3f803f80"
    multiply = (
        "mov.b32 b, 0x80008000; fma.rn.bf16x2" if is_bf16 else "mov.b32 b, 0x80008000; fma.rn.f16x2"
    )
    for place in (0, 1):
        lines += [
            f"shl.b32 w, $2, {8 - 8 * place};",
            f"shr.u32 a, w, {shift};",
            f"and.b32 a, a, {mask};",
            "lop3.b32 a, w, 0x80008000, a, 0xea;",
            f"mov.b32 c, {power};",
            f"{multiply} ${place}, a, c, b;",
        ]
    return lines


def _lookup(levels: tuple[float, ...], dtype: torch.dtype) -> str:
    """From two words in ``$4`` the numbers of both at each of the four places, ``$0`` to ``$3``."""
    bits = sixteen_bits(levels, dtype)
    low, high = (
        [
            "0x" + "".join(f"{bits[first + i] >> shift & 0xFF:02x}" for i in (3, 2, 1, 0))
            for first in (0, 4, 8, 12)
        ]
        for shift in (0, 8)
    )
    lines = [
        ".reg .b32 i, s, a, b, l0, h0, l1, h1;",
        "and.b32 i, $4, 0x77777777;",
        "shr.b32 s, $4, 1;",
        "lop3.b32 s, s, 0x44444444, 0x32103210, 0xea;",
    ]
    for word in (0, 1):
        if word:
            lines += ["shr.u32 i, i, 16;", "shr.u32 s, s, 16;"]
        for name, table in ((f"l{word}", low), (f"h{word}", high)):
            lines += [
                f"{PERMUTE} a, {table[0]}, {table[1]}, i;",
                f"{PERMUTE} b, {table[2]}, {table[3]}, i;",
                f"{PERMUTE} {name}, a, b, s;",
            ]
    for place, bytes_of_two in ((0, "0x5140"), (2, "0x7362")):
        lines += [
            f"{PERMUTE} a, l0, h0, {bytes_of_two};",
            f"{PERMUTE} b, l1, h1, {bytes_of_two};",
            f"{PERMUTE} ${place}, a, b, 0x5410;",
            f"{PERMUTE} ${place + 1}, a, b, 0x7632;",
        ]
    return "{ " + " ".join(lines) + " }"
