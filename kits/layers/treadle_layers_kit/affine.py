"""Linear layers of whole codes with a scale and a zero point for each group of inputs, whichever format they come from.

Formats pack codes in many orders. What reads one brings it into this one, so that only this is divided
among ranks and given to kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle_layers_kit.dequantized import DequantizedLinear, replace_parameter, scaled
from treadle_layers_kit.int4_packing import Int4Module, Int4Packing
from treadle_layers_kit.packed_layout import codes_of_bytes
from treadle_layers_kit.rounded_inputs import RoundedInputs, Rounding, RowProduct
from treadle_layers_kit.weight import empty_weight

__all__ = ("AffineLinear", "RoundedAffineLinear", "bytes_of_codes", "codes_of_bytes", "stored_bits")


class AffineLinear(DequantizedLinear):
    """``(code - zero) · scale``.

    ``weight`` is uint8 ``[out, in · bits / 8]`` for 1, 2, 4 or 8 bits, the first code in the lowest bits.
    ``weight_scale`` and ``weight_zero`` are float32 ``[out, groups]``. ``group`` counts inputs; 0: all of
    them. Four bits use the kernels that ``Int4Packing`` has for them.
    """

    def __init__(self, bits: int, group: int, *, cuda: bool = False) -> None:
        self.bits, self.group, self.cuda = bits, group, cuda
        self.step = 0
        self.int4: Int4Module | None = None

    def register(self, module: nn.Module, out: int) -> None:
        size, total, per_byte = self.inputs.size, self.inputs.total, 8 // self.bits
        self.group = self.group or total
        self.check_groups(self.group)
        self.packing = Int4Packing(module, size, self.group, self.dtype, cuda=self.cuda)
        if size % per_byte:
            raise ConfigError(
                f"{self.prefix} has {size} input features on each rank; {self.bits} bits pack {per_byte} "
                "into one byte, so choose a smaller tensor_parallel_size"
            )
        weight = empty_weight(
            (out, size // per_byte), torch.uint8, output_dim=0, input_dim=1, input_block=per_byte
        )
        module.register_parameter("weight", weight)
        for name in ("weight_scale", "weight_zero"):
            # Every rank gets the scales of all inputs, because its own may begin inside a group.
            steps = empty_weight((out, total // self.group), torch.float32, output_dim=0)
            module.register_parameter(name, steps)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Keep the scales of this rank's inputs only, and repack for a kernel if there is one."""
        steps = {}
        for name in ("weight_scale", "weight_zero"):
            steps[name], self.step = self.local(module.get_parameter(name).data, self.group)
        self._pack_int4(module.get_parameter("weight").data, **steps)
        if self.int4 is not None:
            del module.weight, module.weight_scale, module.weight_zero
            module.add_module("int4", self.int4)
            return
        for name, data in steps.items():
            replace_parameter(module, name, data)
        weight = module.get_parameter("weight").data
        self.repack_codes(
            module, self.bits, lambda begin, end: codes_of_bytes(weight[begin:end], self.bits),
            steps["weight_scale"], steps["weight_zero"], self.step,
        )  # fmt: skip

    def _pack_int4(self, weight: Tensor, weight_scale: Tensor, weight_zero: Tensor) -> None:
        if not self.packing.takes(self.bits) or self.inputs.size % self.step:
            return
        scales, zeros = weight_scale.t().contiguous(), weight_zero.t().contiguous()
        if self.cuda and not _are_codes(zeros):  # the kernel's zero points have no fractions
            return
        self.int4 = self.packing.pack(
            lambda begin, end: codes_of_bytes(weight[begin:end], self.bits).t().contiguous(),
            scales, zeros, self.step,
        )  # fmt: skip

    def dense(self, module: Any) -> Tensor:
        codes = codes_of_bytes(module.weight, self.bits).float()
        return scaled(codes, module.weight_scale, self.step, module.weight_zero)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.int4 is None:
            return super().apply(module, x, bias)
        y: Tensor = self.int4(x)
        return y if bias is None else y + bias


class RoundedAffineLinear(RoundedInputs, AffineLinear):
    """Of 8 bits, multiplied in int8 where no output has groups or a zero point."""

    def __init__(self, group: int, rounding: Rounding, product: RowProduct) -> None:
        super().__init__(8, group)
        self.rounding, self.product = rounding, product


def stored_bits(bits: int) -> int:
    """Return how many bits a code of so many takes in a byte: 1, 2, 4 or 8."""
    return next(size for size in (1, 2, 4, 8) if bits <= size)


def bytes_of_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[out, in]`` of 1, 2, 4 or 8 bits to uint8 ``[out, in · bits / 8]``."""
    pieces = codes.to(torch.uint8).unflatten(1, (-1, 8 // bits))
    packed: Tensor = pieces[..., 0].clone()
    for place in range(1, 8 // bits):
        packed |= pieces[..., place] << (place * bits)
    return packed


def _are_codes(zeros: Tensor) -> bool:
    return bool((zeros.eq(zeros.round()) & (zeros >= 0) & (zeros <= 16)).all())
