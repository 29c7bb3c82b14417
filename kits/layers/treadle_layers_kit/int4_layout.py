"""The one layout in which kernels read four-bit weights, whatever the checkpoint's is; its product.

Codes are int16 ``[chunks, out, 32]``: a chunk is 128 inputs, and word ``i`` of an output holds the
codes of its inputs ``i``, ``32 + i``, ``64 + i`` and ``96 + i``, from the lowest bits on. A matrix
fragment of words is then, place by place, a fragment of weights for 32 consecutive inputs, which
tensor cores take without any exchange between threads; and a tile of outputs of one chunk is one run
of memory. Inputs beyond the last are codes of zero.

Steps are int32 ``[groups, out]``: the scale in float16 in the upper half and, in the lower half, in
the type of the activations, ``-(bias + zero)``. There ``bias`` is 128 for bfloat16 and 1024 for
float16, because the bits of a code below those of that number are the number plus the code: one
addition makes ``code - zero`` of it, exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ("BIAS", "CHUNK", "RUN", "int4_linear", "pack_codes", "pack_steps", "unpack")

CHUNK = 128
"""Inputs of a chunk."""
RUN = CHUNK // 4
"""Inputs of a place of the words, which must be of one group."""
PIECE = 4096
"""Outputs that are unpacked at a time: numbers take more room meanwhile."""
BIAS = {torch.bfloat16: 128, torch.float16: 1024}


def pack_codes(codes: Tensor) -> Tensor:
    """int ``[in, out]`` of codes 0 to 15 to int16 ``[chunks, out, 32]``."""
    padded = F.pad(codes.to(torch.int32), (0, 0, 0, -len(codes) % CHUNK))
    nibbles = padded.unflatten(0, (-1, 4, RUN))
    words: Tensor = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
    return words.transpose(1, 2).to(torch.int16).contiguous()


def pack_steps(scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """``[groups, out]`` each, zeros 0 to 16, to int32 ``[groups, out]`` for activations of ``dtype``."""
    zero_bits = -(zeros.to(dtype) + BIAS[dtype])
    scale_bits = scales.to(torch.float16)
    pairs = torch.stack([t.view(torch.int16) for t in (zero_bits, scale_bits)], dim=-1)
    return pairs.view(torch.int32).squeeze(-1)


def unpack(codes: Tensor, steps: Tensor, inputs: int, group: int, dtype: torch.dtype) -> Tensor:
    """The weight ``[out_features, inputs]``, in the type that it was packed for."""
    chunks, out_features, _ = codes.shape
    weight = torch.empty((out_features, chunks, 4, RUN), dtype=dtype, device=codes.device)
    first = torch.arange(0, chunks * CHUNK, RUN, device=codes.device)
    # Beyond the last input there is no group, and what is made of it is cut off.
    groups = (first.clamp(max=inputs - 1) // group).view(chunks, 4)
    for begin in range(0, out_features, PIECE):
        words = codes[:, begin : begin + PIECE]
        for nibble in range(4):
            scale_zero = steps[:, begin : begin + PIECE][groups[:, nibble]]
            zero = scale_zero.to(torch.int16).view(dtype).float().add_(BIAS[dtype])
            scale = (scale_zero >> 16).to(torch.int16).view(torch.float16).float()
            numbers = (words >> (4 * nibble)).bitwise_and_(15).float()
            numbers.add_(zero[..., None]).mul_(scale[..., None])
            weight[begin : begin + PIECE, :, nibble] = numbers.transpose(0, 1)
    return weight.view(out_features, -1)[:, :inputs]


def int4_linear(x: Tensor, codes: Tensor, steps: Tensor, inputs: int, group: int) -> Tensor:
    """The operation of ``treadle_layers_kit.kernel_ops``, by torch's own: the weight is unpacked each time."""
    return F.linear(x, unpack(codes, steps, inputs, group, x.dtype))
