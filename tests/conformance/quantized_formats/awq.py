"""Matrices in the ``gemv`` packings of AutoAWQ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from treadle.testing.packing import AwqFormat, Packed

__all__ = ("GemvFormat", "rounded")

# Where the inputs of a run of 32 lie: pairs of four lanes, then even inputs before odd ones.
LANES = torch.arange(32).view(4, 4, 2).transpose(0, 1).reshape(4, 4, 2).transpose(1, 2).flatten()


def rounded(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[out, in]``, and scales and zero points ``[out, groups]``."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (groups / scales + zeros).round().clamp(0, 15)
    return codes.flatten(1), scales.squeeze(2), zeros.squeeze(2)


@dataclass(frozen=True)
class GemvFormat:
    """``gemv`` has words along the inputs; in ``gemv_fast`` four rows alternate."""

    version: Literal["gemv", "gemv_fast"] = "gemv"
    group: int = 32
    optional: Sequence[str] = ()

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {**AwqFormat(self.group).config(unquantized), "version": self.version}

    def pack(self, weight: Tensor) -> Packed:
        codes, scales, zeros = rounded(weight, self.group)
        multiple = {32: 4, 64: 2}.get(self.group, 1)
        width = -(-scales.shape[1] // (8 * multiple)) * 8 * multiple
        pad = (0, width - scales.shape[1])
        padded_scales = torch.nn.functional.pad(scales, pad).half()
        padded_zeros = torch.nn.functional.pad(zeros, pad)
        if self.version == "gemv":
            tensors = {
                "qweight": _words(codes),
                "qzeros": _words(padded_zeros),
                "scales": padded_scales,
            }
        else:
            products = -(padded_scales.float() * padded_zeros)
            tensors = {
                "qweight": _alternating(codes),
                "qzeros": products.half().t().contiguous(),
                "scales": padded_scales.t().contiguous(),
            }
        spread = [t.repeat_interleave(self.group, dim=1) for t in (scales, zeros)]
        return Packed(tensors, (codes - spread[1]) * spread[0])


def _words(codes: Tensor) -> Tensor:
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= codes[:, place::8].long() << (4 * place)
    return words.to(torch.int32)


def _alternating(codes: Tensor) -> Tensor:
    """int16 ``[out / 4, in]``."""
    out, inputs = codes.shape
    placed = codes.long().view(out, -1, 32)[..., LANES].view(out // 4, 4, -1, 64)
    runs = placed.transpose(1, 2).reshape(out // 4, -1, 4)
    words = runs[..., 0] | runs[..., 1] << 4 | runs[..., 2] << 8 | runs[..., 3] << 12
    return words.view(out // 4, inputs).to(torch.int16)
