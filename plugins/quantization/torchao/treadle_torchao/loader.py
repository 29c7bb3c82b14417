"""Brings the matrices of torchao into rows of codes.

``X.weight`` is stored as ``X._weight_qdata`` with ``X._weight_scale`` and mostly ``X._weight_zero_point``: int8 codes
above a whole zero point, FP8 numbers, or pairs of four signed bits ``[out, in / 2]`` whose scales and zero points
are ``[groups, out]``, the latter in the unit of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from treadle_layers_kit.affine import bytes_of_codes, stored_bits
from treadle_torchao.config import Config
from treadle_weights_kit.repacked import Files, Matrix, RepackedLoader

__all__ = ("torchao_loader",)

CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
# What multiplies activations, and the tensors of layouts that are made for one kernel.
UNREAD = (
    *("_weight_act_pre_scale", "_weight_per_tensor_scale", "_weight_act_per_tensor_scale"),
    *("_weight_scale_and_zero", "_weight_group_scale", "_weight_group_zero", "_weight_row_scale"),
)
WHOLE = (torch.int8, torch.int32, torch.int64)


def torchao_loader(files: Files, config: Config | None) -> RepackedLoader:
    """A loader of what torchao stored in safetensors; without a configuration nothing is converted."""

    def convert(matrix: Matrix) -> Mapping[str, Tensor]:
        if unread := [leaf for leaf in UNREAD if leaf in matrix.tensors]:
            raise matrix.wrong(unread[0], "treadle-torchao reads no matrices that have this tensor")
        weights = config.weights(matrix.path) if config is not None else None
        if weights is None:
            raise matrix.wrong(CODES, "quantization_config says that this layer is in full")
        if weights.kind == "fp8":
            return _floats(matrix)
        return _pairs(matrix) if weights.pairs else _codes(matrix, weights.bits)

    def needed(path: str) -> tuple[str, ...]:
        weights = config.weights(path) if config is not None else None
        return (SCALE, ZERO) if weights is not None and weights.pairs else (SCALE,)

    return RepackedLoader(files, (CODES,), (SCALE, ZERO, *UNREAD), needed, convert)


def _floats(matrix: Matrix) -> Mapping[str, Tensor]:
    weight = matrix.take(CODES, (torch.float8_e4m3fn,), (-1, -1))
    scale = matrix.scales(SCALE)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(len(weight), 1).contiguous()
    return {"weight": weight, "weight_scale": scale}


def _codes(matrix: Matrix, bits: int) -> Mapping[str, Tensor]:
    codes = matrix.take(CODES, (torch.int8,), (-1, -1)).to(torch.int16)
    middle, stored = 1 << (bits - 1), stored_bits(bits)
    if codes.numel() and not -middle <= int(codes.min()) <= int(codes.max()) < middle:
        raise matrix.wrong(CODES, f"it has codes beyond {bits} bits")
    if codes.shape[1] % (8 // stored):
        raise matrix.wrong(CODES, f"{codes.shape[1]} codes of {bits} bits fill no whole bytes")
    scale = matrix.scales(SCALE)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(len(codes), 1).contiguous()
    zero = torch.zeros_like(scale)
    if ZERO in matrix.tensors:
        stored_zero = matrix.tensors[ZERO]
        zero = (
            matrix.take(ZERO, WHOLE).float() if stored_zero.dtype in WHOLE else matrix.floats(ZERO)
        )
        if zero.numel() not in (1, scale.numel()):
            raise matrix.wrong(ZERO, f"{zero.numel()} zero points for {scale.numel()} scales")
        zero = zero.reshape(-1).expand(scale.numel()).reshape(scale.shape)
    return {
        "weight": bytes_of_codes(codes + middle, stored),
        "weight_scale": scale,
        "weight_zero": zero + middle,
    }


def _pairs(matrix: Matrix) -> Mapping[str, Tensor]:
    packed = matrix.take(CODES, (torch.uint8, torch.int8), (-1, -1)).view(torch.uint8)
    scale = matrix.scales(SCALE, (-1, len(packed))).t().contiguous()
    zero = matrix.floats(ZERO, tuple(reversed(scale.shape))).t()
    # w = signed · s + z = (signed + 8 - (8 - z / s)) · s; flipping the sign bit of a nibble adds 8.
    return {
        "weight": packed ^ 0x88,
        "weight_scale": scale,
        "weight_zero": 8 - zero / scale.clamp_min(torch.finfo(torch.float32).tiny),
    }
