"""Brings the integer matrices of Quark into rows of codes; those of FP8 and MXFP4 are rows already.

Four bits are eight in an int32, along the inputs, and with groups the whole matrix is transposed, its scales
and zero points too. ``reorder`` interleaves the nibbles of a word as AutoAWQ does. Zero points are packed
like the codes that they belong to, or numbers in full.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from treadle_layers_kit.affine import bytes_of_codes
from treadle_quark.config import FP4, FP8, Config, Weights
from treadle_weights_kit.repacked import Files, Matrix, RepackedLoader

__all__ = ("quark_loader",)

WEIGHT, SCALE, ZERO = "weight", "weight_scale", "weight_zero_point"
REORDERED = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word, from the lowest, that holds each of its eight columns."""
WORDS = {4: (torch.int32,), 8: (torch.int8, torch.uint8)}


def quark_loader(files: Files, config: Config | None) -> RepackedLoader:
    """A loader of what Quark stored in safetensors."""

    def convert(matrix: Matrix) -> Mapping[str, Tensor]:
        weights = config.weights(matrix.path) if config is not None else None
        if weights is None:
            raise matrix.wrong(SCALE, "quantization_config says that this layer is in full")
        if weights.dtype in (FP8, FP4):
            return {leaf: matrix.tensors[leaf] for leaf in (WEIGHT, SCALE)}
        return _codes(matrix, weights, reorder=config is None or config.reorder)

    def needed(path: str) -> tuple[str, ...]:
        weights = config.weights(path) if config is not None else None
        unsigned = weights is not None and weights.dtype.startswith("u")
        return (WEIGHT, SCALE, ZERO) if unsigned else (WEIGHT, SCALE)

    return RepackedLoader(files, (SCALE, ZERO), (WEIGHT,), needed, convert)


def _codes(matrix: Matrix, weights: Weights, *, reorder: bool) -> Mapping[str, Tensor]:
    bits, grouped = weights.bits, weights.scheme == "per_group"
    scale = matrix.scales(SCALE)
    zero = torch.zeros_like(scale)
    codes = _unpacked(matrix, WEIGHT, weights, reorder)
    if ZERO in matrix.tensors:
        stored = matrix.tensors[ZERO]
        if stored.is_floating_point():
            zero = matrix.floats(ZERO)
        else:
            zero = _unpacked(matrix, ZERO, weights, reorder).float()
    if grouped:
        if scale.dim() != 2 or codes.dim() != 2:
            raise matrix.wrong(SCALE, f"its shape is {list(scale.shape)}, not [groups, out]")
        # Words at the end of a row may be padded.
        codes, zero = codes[:, : scale.shape[1]].t(), zero[..., : scale.shape[1]].t()
        scale = scale.t().contiguous()
    elif codes.dim() == 2:
        rows = len(codes)
        scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1, 1).expand(rows, 1)
        zero = (
            zero.flatten()[: len(scale)].reshape(-1, 1) if zero.numel() > 1 else zero.reshape(1, 1)
        )
        zero = zero.expand(rows, 1) if len(zero) == 1 else zero
    if codes.dim() != 2 or len(codes) != len(scale) or zero.shape != scale.shape:
        raise matrix.wrong(
            SCALE, f"scales {list(scale.shape)} and zero points {list(zero.shape)} do not fit "
            f"codes {list(codes.shape)}"
        )  # fmt: skip
    if codes.shape[1] % (8 // bits):
        raise matrix.wrong(WEIGHT, f"{codes.shape[1]} codes of {bits} bits fill no whole bytes")
    middle = 0 if weights.dtype.startswith("u") else 1 << (bits - 1)
    return {
        "weight": bytes_of_codes(codes + middle, bits),
        "weight_scale": scale.contiguous(),
        "weight_zero": (zero + middle).contiguous(),
    }


def _unpacked(matrix: Matrix, leaf: str, weights: Weights, reorder: bool) -> Tensor:
    """int16 of the same shape, whose last dimension is eight times as long for four bits."""
    tensor = matrix.take(leaf, WORDS[weights.bits])
    if weights.bits == 8:
        if tensor.dtype is not (torch.uint8 if weights.dtype == "uint8" else torch.int8):
            raise matrix.wrong(leaf, f"it is {tensor.dtype} where the scheme says {weights.dtype}")
        return tensor.to(torch.int16)
    if tensor.dim() == 0:
        codes = tensor & 15
    else:
        places = torch.tensor(REORDERED if reorder else range(8), dtype=torch.int32)
        codes = ((tensor[..., None] >> (4 * places)) & 15).flatten(-2)
    signed = weights.dtype == "int4"
    return (((codes ^ 8) - 8) if signed else codes).to(torch.int16)
