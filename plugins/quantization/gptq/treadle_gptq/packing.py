"""The packing of GPTQ checkpoints, as AutoGPTQ began it and GPTQModel continues it.

``qweight`` int32 ``[in · bits / 32, out]``: a word holds the codes of consecutive inputs, the first
in its lowest bits; of three bits, 32 codes are in three words, and two of them reach into the next one. ``qzeros`` int32 ``[groups, out · bits / 32]``: consecutive outputs, likewise.
``scales`` float16 ``[groups, out]``. ``g_idx`` int32 ``[in]``: the group of each input; without
act-order (``desc_act``) it counts up. The weight is ``(code - zero) · scale``, transposed.

Version 1 of the format (``checkpoint_format`` ``gptq``) stores each zero point less one. Writers
subtract from whole words, so a zero point of 0 borrows from its neighbour; adding to whole words
before unpacking gives back exactly what was there. Of three bits they subtract from each code.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

__all__ = (
    "codes_of_words",
    "codes_per_element",
    "dequantize",
    "unpack_inputs",
    "unpack_outputs",
)

FIRST = 21
"""Of 32 codes of three bits, those that 64 bits hold whole."""


def codes_of_words(bits: int) -> int:
    """Return how many codes fill whole words."""
    return 32 if bits == 3 else 32 // bits


def codes_per_element(bits: int) -> int | Fraction:
    """Return how many codes one word stands for."""
    return Fraction(32, 3) if bits == 3 else 32 // bits


def unpack_inputs(packed: Tensor, bits: int) -> Tensor:
    """int32 ``[in · bits / 32, out]`` to int32 ``[in, out]`` of codes."""
    if bits == 3:
        return _unpack_three(packed)
    shifts = _shifts(bits, packed)[:, None]
    codes = torch.bitwise_right_shift(packed[:, None], shifts)
    return codes.bitwise_and(_mask(bits)).flatten(0, 1)


def unpack_outputs(packed: Tensor, bits: int, offset: int) -> Tensor:
    """int32 ``[groups, out · bits / 32]`` to int32 ``[groups, out]``; ``offset`` is added first."""
    if bits == 3:
        return _unpack_three(packed.t()).add_(offset).bitwise_and_(_mask(bits)).t()
    ones = sum(offset << shift for shift in range(0, 32, bits))
    packed = (packed.long() + ones).to(torch.int32)  # wraps around, as the subtraction did
    codes = torch.bitwise_right_shift(packed[..., None], _shifts(bits, packed))
    return codes.bitwise_and(_mask(bits)).flatten(-2)


def dequantize(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group: int,
    index: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The weight ``[in, out]`` in ``dtype``; ``scales`` and ``zeros`` are ``[groups, out]``.

    ``index`` int64 ``[in]`` is the group of each input; ``None``: ``group`` inputs each.
    """
    codes = unpack_inputs(qweight, bits).to(scales.dtype)
    if index is not None:
        return codes.sub_(zeros[index]).mul_(scales[index]).to(dtype)
    codes = codes.unflatten(0, (-1, group)).sub_(zeros[:, None]).mul_(scales[:, None])
    return torch.flatten(codes, 0, 1).to(dtype)


def _unpack_three(packed: Tensor) -> Tensor:
    """int32 ``[3 · n, columns]`` to int32 ``[32 · n, columns]``."""
    low, middle, high = (
        word.long() & 0xFFFFFFFF for word in packed.unflatten(0, (-1, 3)).unbind(1)
    )
    first, last = low | middle << 32, middle >> 31 | high << 1
    shifts = torch.arange(0, 3 * FIRST, 3, device=packed.device)[:, None]
    codes = torch.cat((first[:, None] >> shifts, last[:, None] >> shifts[: 32 - FIRST]), dim=1)
    return codes.bitwise_and_(_mask(3)).to(torch.int32).flatten(0, 1)


def _shifts(bits: int, like: Tensor) -> Tensor:
    # Computed on the device: a table would be a copy from the host, which no CUDA graph may hold.
    return torch.arange(0, 32, bits, dtype=torch.int32, device=like.device)


def _mask(bits: int) -> int:
    return (1 << bits) - 1
