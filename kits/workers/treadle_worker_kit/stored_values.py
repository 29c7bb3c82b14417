"""What the numbers of a quantized checkpoint must be, whichever plugin reads them.

A scale that is not finite makes every answer NaN, and scales of zero make it noise; neither can be seen
in a shape. Scales of activations and caches are divided by, so that they must be positive. A weight may
have a scale of zero where its group is zero, and auto-round writes ``scales`` that have signs. An ``absmax``
that is quantized itself may be rounded to less than nothing. Zero points that are numbers may be any finite ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("has_nan_bytes", "problem_of_scales")

DIVISORS = frozenset(
    {
        *("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale"),
        *("kv_scale", "input_global_scale", "weight_global_scale"),
    }
)
SIGNED = frozenset({"scales", "absmax"})
WEIGHTS = frozenset(
    {"scales", "weight_scale", "weight_scale_inv", "weight_scale_2", "absmax", "SCB"}
)
ZEROS = frozenset({"qzeros", "weight_zero"})
"""Zero points, where they are numbers in full."""
# The least byte that is no finite number, without its sign.
NAN_BYTES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
PIECE = 2**24


def problem_of_scales(name: str, tensor: Tensor) -> str | None:
    """Return what is wrong with a checkpoint's tensor, if its name is one of scales."""
    leaf = name.rpartition(".")[2]
    if leaf not in WEIGHTS | DIVISORS | ZEROS and not leaf.endswith("_scales"):
        return None
    if tensor.dtype is torch.uint8 and leaf.endswith(("_scale", "_scales")):
        tensor = tensor.view(torch.float8_e8m0fnu)  # exponents of powers of two
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    values = tensor.float()
    if bad := int((~values.isfinite()).sum()):
        kind = "zero points" if leaf in ZEROS else "scales"
        return f"{bad} of its {values.numel()} {kind} are NaN or infinite"
    if leaf in ZEROS:
        return None
    low, high = (float(value) for value in values.aminmax())
    if leaf in DIVISORS and low <= 0:
        return f"a scale is {low:g}; it is divided by, so it must be above 0"
    if low < 0 and leaf not in SIGNED:
        return f"a scale is {low:g}; it must not be negative"
    if low == high == 0:
        return "every scale is 0, so that nothing would be left of the weight"
    return None


def has_nan_bytes(tensor: Tensor) -> bool:
    """Return whether an FP8 tensor holds a byte that is no finite number."""
    first = NAN_BYTES.get(tensor.dtype)
    if first is None or tensor.is_meta:
        return False
    # Bytes, because conversions that are fast on a CPU make numbers of them. In pieces, for the copy.
    pieces = tensor.detach().contiguous().view(torch.uint8).flatten().split(PIECE)
    return any(bool((piece & 0x7F).ge(first).any()) for piece in pieces)
