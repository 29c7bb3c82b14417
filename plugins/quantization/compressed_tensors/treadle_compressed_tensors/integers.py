"""Linear layers of integers.

``weight_packed`` int32 ``[out, in · bits / 32]`` holds codes above ``-2^(bits - 1)`` from the lowest bits,
``weight`` int8 ``[out, in]`` the numbers themselves. ``weight_scale`` is ``[out, groups]``, or a scalar
for a matrix. ``weight_zero_point`` has its shape: packed along the outputs, or int8. With act-order,
``weight_g_idx`` int32 ``[in]`` is the group of each input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle.errors import CheckpointError, ConfigError
from treadle_compressed_tensors.config import Weights
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import DequantizedLinear, replace_parameter, scaled
from treadle_layers_kit.int4_packing import Int4Module, Int4Packing
from treadle_layers_kit.rounded_inputs import RoundedInputs, Rounding, RowProduct
from treadle_layers_kit.row_packing import ORDER, even_order

__all__ = ("IntLinear", "RoundedIntLinear", "unpack")


class IntLinear(DequantizedLinear):
    """``(code - zero) · scale``; four bits use the kernels that ``Int4Packing`` has for them."""

    def __init__(self, weights: Weights, *, cuda: bool = False) -> None:
        self.weights, self.cuda = weights, cuda
        self.bits = int(weights.kind.removeprefix("int"))
        self.step = 0
        self.int4: Int4Module | None = None

    def register(self, module: nn.Module, out: int) -> None:
        weights, inputs = self.weights, self.inputs
        self.group = weights.group_size if weights.strategy == "group" else inputs.total
        self.check_groups(self.group)
        self.packing = Int4Packing(module, inputs.size, self.group, self.dtype, cuda=self.cuda)
        per_word = 32 // self.bits
        if weights.packed:
            self._check_words(per_word)
            packed = empty_weight(
                (out, -(-inputs.size // per_word)), torch.int32,
                output_dim=0, input_dim=1, input_block=per_word,
            )  # fmt: skip
            default = None if weights.act_order else -1.0
            index = empty_weight((inputs.size,), torch.int32, input_dim=0, default=default)
            module.register_parameter("weight_packed", packed)
            module.register_parameter("weight_g_idx", index)
        else:
            plain = empty_weight((out, inputs.size), torch.int8, output_dim=0, input_dim=1)
            module.register_parameter("weight", plain)
        groups = inputs.total // self.group
        if weights.strategy == "tensor":
            scale = empty_weight((len(self.sizes),), torch.float32, per_part=True)
        else:
            scale = empty_weight((out, groups), torch.float32, output_dim=0)
        module.register_parameter("weight_scale", scale)
        if weights.symmetric:
            return
        if weights.strategy == "tensor":
            zeros = empty_weight((len(self.sizes),), torch.int8, per_part=True)
        elif weights.packed:
            shape = (sum(-(-size // per_word) for size in self.sizes), groups)
            zeros = empty_weight(shape, torch.int32, output_dim=0, output_block=per_word)
        else:
            zeros = empty_weight((out, groups), torch.int8, output_dim=0)
        module.register_parameter("weight_zero_point", zeros)

    def _check_words(self, per_word: int) -> None:
        sides = [("input", self.inputs.size, self.inputs.total)]
        if not self.weights.symmetric:
            sides += [("output", size, 0) for size in self.sizes]
        for side, size, total in sides:
            if size % per_word and size != total:
                raise ConfigError(
                    f"{self.prefix} has {size} {side} features on each rank; {self.bits} bits pack "
                    f"{per_word} into one word, so choose a smaller tensor_parallel_size"
                )

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Keep the scales of this rank's inputs only, and repack for a kernel if there is one."""
        scale, zeros = module.get_parameter("weight_scale").data, self._zeros(module)
        if self.weights.strategy == "tensor":
            scale = self.expand(scale)
            zeros = None if zeros is None else self.expand(zeros)
        index = self._index(module, scale.shape[1])
        order = None if index is None or self.cuda else even_order(index, self.group)
        if index is None:
            scale, self.step = self.local(scale, self.group)
            zeros = None if zeros is None else self.local(zeros, self.group)[0]
        if index is None or order is not None:
            self._pack_int4(module, scale, zeros, order)
            if self.int4 is not None:
                del module.weight_packed, module.weight_scale
                module.add_module("int4", self.int4)
                module.register_buffer(ORDER, order, persistent=False)
                return
        if index is not None:
            module.register_buffer("index", index, persistent=False)
        replace_parameter(module, "weight_scale", scale)
        if zeros is not None:
            replace_parameter(module, "zeros", zeros.to(torch.int8))
        middle = 1 << (self.bits - 1)
        self.repack_codes(
            module, self.bits, lambda *rows: self._codes(module, *rows).to(torch.int16) + middle, scale,
            torch.full_like(scale, middle) if zeros is None else zeros + middle, self.step or self.group, index,
        )  # fmt: skip

    def _codes(self, module: Any, begin: int, end: int) -> Tensor:
        """Of some outputs, signed."""
        if not self.weights.packed:
            return module.weight.data[begin:end]  # type: ignore[no-any-return]
        return unpack(module.weight_packed[begin:end], self.bits)[:, : self.inputs.size]

    def _zeros(self, module: nn.Module) -> Tensor | None:
        """float32 ``[out, groups]``, or ``[matrices]``, in the range of the codes."""
        if self.weights.symmetric:
            return None
        zeros = module.get_parameter("weight_zero_point").data
        del module.weight_zero_point
        if zeros.dtype is torch.int32:
            words = zeros.t().contiguous()
            pieces = words.split([-(-size * self.bits // 32) for size in self.sizes], dim=1)
            rows = zip(pieces, self.sizes, strict=True)
            zeros = torch.cat([unpack(p, self.bits)[:, :size] for p, size in rows], dim=1).t()
        return zeros.float()

    def _index(self, module: nn.Module, groups: int) -> Tensor | None:
        """int64 ``[in]``: the group of each input; ``None`` if they are in order."""
        if not self.weights.packed:
            return None
        index = module.get_parameter("weight_g_idx").data.long()
        del module.weight_g_idx
        if not len(index) or int(index.max()) < 0:
            return None
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise CheckpointError(
                f"weight_g_idx of {self.prefix} names groups {int(index.min())} to {int(index.max())}, "
                f"but there are {groups} groups of {self.group}"
            )
        places = self.inputs.start + torch.arange(len(index), device=index.device)
        return None if torch.equal(index, places // self.group) else index

    def _pack_int4(
        self, module: nn.Module, scale: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> None:
        group = self.step or self.group
        if self.bits != 4 or not self.weights.packed or self.inputs.size != group * scale.shape[1]:
            return
        packed = module.get_parameter("weight_packed").data
        inputs = self.inputs.size
        offset = torch.full_like(scale, 8) if zeros is None else zeros + 8
        scales, offsets = scale.t().contiguous(), offset.t().contiguous()

        def columns(begin: int, end: int) -> Tensor:
            codes = (unpack(packed[begin:end], 4)[:, :inputs] + 8).t()
            return codes.contiguous() if order is None else codes[order]

        self.int4 = self.packing.pack(columns, scales, offsets, group, in_order=order is None)

    def dense(self, module: Any) -> Tensor:
        inputs = self.inputs.size
        if self.weights.packed:
            values = unpack(module.weight_packed, self.bits)[:, :inputs].float()
        else:
            values = module.weight.float()
        zeros = getattr(module, "zeros", None)
        zeros = None if zeros is None else zeros.float()
        if (index := getattr(module, "index", None)) is not None:
            if zeros is not None:
                values = values.sub_(zeros[:, index])
            return values.mul_(module.weight_scale[:, index])
        return scaled(values, module.weight_scale, self.step, zeros)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.int4 is None:
            return super().apply(module, x, bias)
        y: Tensor = self.int4(x if module.order is None else x.index_select(-1, module.order))
        return y if bias is None else y + bias


class RoundedIntLinear(RoundedInputs, IntLinear):
    """int8 times int8."""

    def __init__(self, weights: Weights, rounding: Rounding, product: RowProduct) -> None:
        super().__init__(weights)
        self.rounding, self.product = rounding, product


def unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, words]`` to int32 ``[rows, words · 32 / bits]`` of ``-2^(bits - 1)`` and above."""
    # Computed on the device: a table would be a copy from the host, which no CUDA graph may hold.
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = torch.bitwise_right_shift(packed[..., None], shifts).bitwise_and_((1 << bits) - 1)
    return codes.flatten(-2).sub_(1 << (bits - 1))
