"""Blocks of GGUF, made number by number as llama.cpp describes them, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from treadle_gguf.blocks import PLACES, dequantize, levels
from treadle_gguf.types import TYPES

from treadle.testing.packing import Packed

__all__ = ("NUMBERS", "GgufFormat", "RandomBlocks", "pack_blocks")

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
NUMBERS |= {"Q6_K": 14, "IQ4_NL": 20}
LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])


@dataclass(frozen=True)
class GgufFormat:
    """Matrices of one type."""

    type: str
    optional: Sequence[str] = ()

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        full = [n if n.startswith("model.") else f"model.layers.{n}" for n in unquantized]
        types = {"*": self.type, **dict.fromkeys(full)}
        return {"quant_method": "gguf", "file": "model.gguf", "types": types}

    def pack(self, weight: Tensor) -> Packed:
        blocks, dense = pack_blocks(weight, self.type)
        return Packed({"weight": blocks}, dense)


class RandomBlocks(GgufFormat):
    """Blocks of random bytes of any type, with scales of a usual size, and what the plugin reads of them."""

    def pack(self, weight: Tensor) -> Packed:
        block, size = TYPES[self.type]
        shape = (len(weight), weight.shape[1] // block, size)
        generator = torch.Generator().manual_seed(len(weight))
        blocks = torch.randint(256, shape, generator=generator).to(torch.uint8)
        for place in PLACES[self.type]:
            scale = torch.rand(*shape[:2], 1, generator=generator) * 2e-5
            blocks[..., place : place + 2] = _bytes(scale.half())
        return Packed({"weight": blocks}, dequantize(blocks, self.type, levels()).flatten(1))


def pack_blocks(weight: Tensor, type: str) -> tuple[Tensor, Tensor]:
    """uint8 ``[out, blocks, bytes]`` of float32 ``[out, in]``, and what they mean."""
    if type == "Q6_K":
        return _q6_k(weight)
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    largest = torch.maximum(-low, high)
    if type == "IQ4_NL":
        d = (largest / 127).half()
        codes = (groups[..., None] / d.float()[..., None] - LEVELS).abs().argmin(-1)
        dense = LEVELS[codes] * d.float()
        return torch.cat((_bytes(d), _halves(codes)), 2), dense.flatten(1)
    bits = int(type[1])
    if type.endswith("_1"):
        top = (1 << bits) - 1
        d, m = ((high - low) / top).half(), low.half()
        codes = ((groups - m.float()) / d.float()).round().clamp(0, top)
        dense, head = codes * d.float() + m.float(), [_bytes(d), _bytes(m)]
    else:
        middle = 1 << (bits - 1)
        d = (largest / (middle - 1)).half()
        signed = (groups / d.float()).round().clamp(-middle, middle - 1)
        dense, head, codes = signed * d.float(), [_bytes(d)], signed + middle
        if bits == 8:
            return torch.cat((*head, signed.to(torch.int8).view(torch.uint8)), 2), dense.flatten(1)
    codes = codes.long()
    if bits == 5:
        weights = 1 << torch.arange(8)
        head.append(((codes >> 4).unflatten(2, (4, 8)) * weights).sum(3).to(torch.uint8))
    return torch.cat((*head, _halves(codes & 15)), 2), dense.flatten(1)


def _q6_k(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.unflatten(1, (-1, 16, 16))
    wanted = groups.abs().amax(3, keepdim=True) / 31
    d = (wanted.amax(2, keepdim=True) / 127).half()
    small = (wanted / d.float()).round().clamp(1, 127)
    codes = (groups / (small * d.float())).round().clamp(-32, 31)
    dense = (codes * small * d.float()).flatten(1)
    plain = (codes + 32).long().flatten(2)
    low, high = torch.zeros(*plain.shape[:2], 128).long(), torch.zeros(*plain.shape[:2], 64).long()
    for half in range(2):
        for place in range(32):
            a, b, c, e = (plain[..., 128 * half + 32 * k + place] for k in range(4))
            low[..., 64 * half + place] = (a & 15) | (c & 15) << 4
            low[..., 64 * half + 32 + place] = (b & 15) | (e & 15) << 4
            high[..., 32 * half + place] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6
    parts = (low.to(torch.uint8), high.to(torch.uint8))
    scales = small.flatten(2).to(torch.int8).view(torch.uint8)
    return torch.cat((*parts, scales, _bytes(d.flatten(2))), 2), dense


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """The first 16 in the lower halves of 16 bytes."""
    return (codes[..., :16] | codes[..., 16:] << 4).to(torch.uint8)
