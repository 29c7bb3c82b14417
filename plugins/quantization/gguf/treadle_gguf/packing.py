"""Blocks as weights of ``packed_linear``, or row by row: four bits where codes have no more, and bytes for five, six and eight."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from treadle_gguf.blocks import LEVELS, MIDDLES, ROWS, Codes, read
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import INT8, Levels
from treadle_layers_kit.row_bytes import RowBytes
from treadle_layers_kit.row_int4 import RowInt4, pack_rows

__all__ = ("pack_blocks", "rows_of_blocks")

BYTES = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
"""Types whose codes become int8."""
FOUR = frozenset(("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS"))
"""Types whose codes have four bits."""


def pack_blocks(blocks: Tensor, type: str, inputs: int, dtype: torch.dtype) -> PackedWeight | None:
    """Return the weight of blocks ``[out, blocks, bytes]``; ``None`` where no kernel takes activations of ``dtype``."""
    if not PackedWeight.takes(blocks.device, dtype):
        return None
    middle = MIDDLES.get(type, 0)
    scales, offsets = _steps(blocks, type, middle)

    def rows(begin: int, end: int) -> Tensor:
        codes = read(blocks[begin:end], type).codes.flatten(1)
        return (codes.to(torch.int8) - middle) if type in BYTES else codes

    return PackedWeight.pack(
        rows,
        scales,
        inputs // scales.shape[1],
        inputs,
        dtype,
        _levels(type, middle),
        offsets=offsets,
    )


def rows_of_blocks(matrices: Sequence[tuple[Tensor, str]], inputs: int) -> RowInt4 | RowBytes:
    """Return the weight of matrices one after the other, each with its type, in the smallest groups of them.

    Of four bits in one type codes stay so small; others become bytes.
    """
    type, *others = {type for _, type in matrices}
    group = gcd(*(inputs // _steps(blocks[:1], type, 0)[0].shape[1] for blocks, type in matrices))
    is_four = not others and type in FOUR and RowInt4.takes(inputs, group)
    flip = 8 if type in MIDDLES else 0
    codes: list[Tensor] = []
    steps: list[tuple[Tensor, Tensor | None]] = []
    for blocks, kind in matrices:
        for piece in blocks.split(ROWS):
            found = read(piece, kind)
            numbers = found.codes.flatten(1)
            codes.append(pack_rows(numbers ^ flip) if is_four else _numbers(numbers, kind))
            steps.append(_steps_of(found, MIDDLES.get(kind, 0)))
    scales, offsets = _joined(steps, group, inputs)
    if is_four:
        levels = None if flip else tuple(map(float, LEVELS))
        return RowInt4(torch.cat(codes), scales, offsets, levels)
    return RowBytes(torch.cat(codes), scales, offsets)


def _numbers(codes: Tensor, type: str) -> Tensor:
    """int8 of codes, less the middle of their type."""
    if type not in MIDDLES:
        return torch.tensor(LEVELS, dtype=torch.int8)[codes.long()]
    return codes.to(torch.int8) - MIDDLES[type]


def _joined(
    steps: Sequence[tuple[Tensor, Tensor | None]], group: int, inputs: int
) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets of all matrices, in groups of ``group``."""
    spread = [
        [None if t is None else t.repeat_interleave(inputs // group // t.shape[1], 1) for t in pair]
        for pair in steps
    ]
    scales = torch.cat([scale for scale, _ in spread if scale is not None])
    if all(offset is None for _, offset in spread):
        return scales, None
    return scales, torch.cat(
        [torch.zeros_like(s) if o is None else o for s, o in spread if s is not None]
    )


def _steps(blocks: Tensor, type: str, middle: int) -> tuple[Tensor, Tensor | None]:
    """float32 ``[out, groups]`` of numbers whose middle is 0: ``number · scale + offset``."""
    pieces = [_steps_of(read(piece, type), middle) for piece in blocks.split(ROWS)]
    offsets = [offset for _, offset in pieces if offset is not None]
    return torch.cat([scale for scale, _ in pieces]), torch.cat(offsets) if offsets else None


def _steps_of(found: Codes, middle: int) -> tuple[Tensor, Tensor | None]:
    scale = found.scale.flatten(1)
    return scale, None if found.minimum is None else middle * scale - found.minimum.flatten(1)


def _levels(type: str, middle: int) -> Levels:
    if type in BYTES:
        return INT8
    return (
        tuple(float(code - middle) for code in range(16))
        if type in MIDDLES
        else tuple(map(float, LEVELS))
    )
