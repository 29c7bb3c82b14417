"""Packed weights of every kind that the kernels distinguish."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from treadle_layers_kit.packed_layout import E2M1, FP8, INT8, WHOLE, Levels, pack_words

__all__ = ("Case", "cases")

Case = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Levels]


def cases(device: str, out: int, inputs: int) -> Iterator[tuple[Case, int]]:
    """Weights and their groups."""
    generator = torch.Generator(device).manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) + 0.5

    for levels in E2M1, WHOLE, INT8, FP8:
        last = 16 if not isinstance(levels, str) else 256 if levels == INT8 else 0x78
        codes = torch.randint(last, (out, inputs), generator=generator, device=device)
        if levels == FP8:  # both signs, and none of the exponents of NaN
            codes |= torch.randint(2, codes.shape, generator=generator, device=device) << 7
        codes = codes.to(torch.uint8)
        for group, run, kind in (
            (128, 32, torch.float16),
            (64, 32, torch.float32),
            (16, 16, torch.float8_e4m3fn),
            (32, 32, torch.uint8),
        ):
            shape = (-(-inputs // group), out)
            scales, words = uniform(*shape), pack_words(codes, levels, run)
            scales = (scales * 10 + 115).to(torch.uint8) if kind is torch.uint8 else scales.to(kind)
            yield (words, scales, None, None, levels), group
            if kind is not torch.uint8:
                offsets = uniform(*shape)
                offsets = offsets if kind is torch.float32 else offsets.half()
                yield (words, scales, offsets, uniform(out), levels), group
        whole = -(-inputs // 128) * 128
        yield (pack_words(codes, levels, 32), None, None, uniform(out), levels), whole
