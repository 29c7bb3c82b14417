"""The packing of GPTQ checkpoints, as AutoGPTQ began it and GPTQModel continues it.

``qweight`` int32 ``[in · bits / 32, out]``: a word holds the codes of consecutive inputs, the first
in its lowest bits. ``qzeros`` int32 ``[groups, out · bits / 32]``: consecutive outputs, likewise.
``scales`` float16 ``[groups, out]``. ``g_idx`` int32 ``[in]``: the group of each input; without
act-order (``desc_act``) it counts up. The weight is ``(code - zero) · scale``, transposed.

Version 1 of the format (``checkpoint_format`` ``gptq``) stores each zero point less one. Writers
subtract from whole words, so a zero point of 0 borrows from its neighbour; adding to whole words
before unpacking gives back exactly what was there.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("dequantize", "pack_inputs", "unpack_inputs", "unpack_outputs")


def unpack_inputs(packed: Tensor, bits: int) -> Tensor:
    """int32 ``[in · bits / 32, out]`` to int32 ``[in, out]`` of codes."""
    shifts = _shifts(bits, packed)[:, None]
    codes = torch.bitwise_right_shift(packed[:, None], shifts)
    return codes.bitwise_and(_mask(bits)).flatten(0, 1)


def pack_inputs(codes: Tensor, bits: int) -> Tensor:
    """The inverse of ``unpack_inputs``."""
    words = torch.bitwise_left_shift(
        codes.unflatten(0, (-1, 32 // bits)), _shifts(bits, codes)[:, None]
    )
    return words.sum(dim=1, dtype=torch.int64).to(torch.int32)


def unpack_outputs(packed: Tensor, bits: int, offset: int) -> Tensor:
    """int32 ``[groups, out · bits / 32]`` to int32 ``[groups, out]``; ``offset`` is added first."""
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


def _shifts(bits: int, like: Tensor) -> Tensor:
    # Computed on the device: a table would be a copy from the host, which no CUDA graph may hold.
    return torch.arange(0, 32, bits, dtype=torch.int32, device=like.device)


def _mask(bits: int) -> int:
    return (1 << bits) - 1
