"""Brings the matrices of HQQ into rows.

HQQ packs the codes of a matrix as one list of groups: those of the first half of the list in the high bits, and
so on; three bits are ten in an int32, and the last rows of these are padding. With ``view_as_float`` the
same bytes are stored as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from treadle_hqq.config import BITS
from treadle_layers_kit.affine import bytes_of_codes, stored_bits
from treadle_weights_kit.repacked import Files, Matrix, RepackedLoader

__all__ = ("hqq_loader", "rows")

NEEDED = ("scale", "zero", "shape", "nbits")
LEAVES = (
    *NEEDED,
    *("group_size", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero"),
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def hqq_loader(files: Files) -> RepackedLoader:
    """A loader of what HQQ stored in safetensors."""
    return RepackedLoader(files, ("W_q",), LEAVES, lambda path: NEEDED, rows)


def rows(matrix: Matrix) -> Mapping[str, Tensor]:
    """The tensors of ``AffineLinear``. Raises ``CheckpointError``."""
    bits = matrix.number("nbits")
    if bits not in BITS:
        raise matrix.wrong("nbits", f"it is {bits}; allowed: {', '.join(map(str, BITS))}")
    shape = matrix.take("shape", (torch.int64, torch.int32), (2,)).tolist()
    out, inputs = shape
    if not (0 < out < 2**31 and 0 < inputs < 2**31):
        raise matrix.wrong("shape", f"it is {shape}")
    # A list of groups, which are all of a row or lie in it.
    scale, zero = matrix.scales("scale").flatten(), matrix.floats("zero").flatten()
    if not len(scale) or len(scale) % out or inputs % (len(scale) // out):
        raise matrix.wrong("scale", f"{len(scale)} scales do not divide a matrix of {shape}")
    if len(zero) != len(scale):
        raise matrix.wrong("zero", f"{len(zero)} zero points for {len(scale)} scales")
    if inputs % (8 // stored_bits(bits)):
        raise matrix.wrong("shape", f"{inputs} inputs of {bits} bits fill no whole number of bytes")
    codes = _codes(matrix, bits, out * inputs, len(scale))
    return {
        "weight": bytes_of_codes(codes.view(out, inputs), stored_bits(bits)),
        "weight_scale": scale.view(out, -1),
        "weight_zero": zero.view(out, -1),
    }


def _codes(matrix: Matrix, bits: int, count: int, groups: int) -> Tensor:
    """uint8 ``[count]``, in the order of the matrix."""
    word = torch.int32 if bits == 3 else torch.uint8
    stored = matrix.take("W_q", (word, *FLOATS)).contiguous().view(word).flatten()
    per_word = 10 if bits == 3 else 8 // bits
    needed = -(-groups // per_word) * (count // groups)
    if len(stored) != needed:
        raise matrix.wrong("W_q", f"it has {len(stored)} words, and {needed} hold {count} weights")
    last = bits * (per_word - 1)
    pieces = [(stored >> (last - bits * place)) & ((1 << bits) - 1) for place in range(per_word)]
    return torch.cat(pieces)[:count].to(torch.uint8)
