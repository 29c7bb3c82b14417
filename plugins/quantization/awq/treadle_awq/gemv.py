"""The ``gemv`` and ``gemv_fast`` packings of AutoAWQ, brought into ``gemm`` when they are loaded.

``gemv``: ``qweight`` int32 ``[out, in / 8]`` and ``qzeros`` int32 ``[out, words]`` in order from the lowest nibble, ``scales``
float16 ``[out, 8 · words]``; the words of an output are padded.

``gemv_fast``: ``qweight`` int16 ``[out / 4, in]``: four rows alternate in runs of 64 inputs, and within 32 inputs nibbles are
placed where the lanes of a warp read them. ``scales`` and ``qzeros`` are float16 ``[padded groups, out]``, and
the latter are ``-zero · scale``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from treadle.errors import ConfigError
from treadle_awq.packing import pack
from treadle_awq.scheme import AwqLinear, scale_dtype
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import replace_parameter

__all__ = ("GemvFastLinear", "GemvLinear")

RUN = 64
"""Inputs of a run of one row in ``gemv_fast``."""


def padded_words(inputs: int, group: int) -> int:
    """Words of eight nibbles for the groups of an output, as AutoAWQ pads them."""
    multiple = {32: 4, 64: 2}.get(group, 1)
    words = -(-(inputs // group) // 8)
    return -(-words // multiple) * multiple


class GemvLinear(AwqLinear):
    """Words along the inputs."""

    def register_stored(self, module: nn.Module, out: int, groups: int) -> None:
        size = self.inputs.size
        self._check_inputs(8)
        words = padded_words(self.inputs.total, self.group)
        packed = empty_weight(
            (out, size // 8), torch.int32, output_dim=0, input_dim=1, input_block=8
        )
        module.register_parameter("qweight", packed)
        module.register_parameter("qzeros", empty_weight((out, words), torch.int32, output_dim=0))
        scales = empty_weight((out, words * 8), scale_dtype(self.dtype), output_dim=0)
        module.register_parameter("scales", scales)
        self.groups = groups

    def _check_inputs(self, block: int) -> None:
        size, first = self.inputs.size, self.inputs.start
        if size % block or first % block:
            raise ConfigError(
                f"{self.prefix} has {size} input features on each rank from {first} on; this "
                f"packing of AWQ has runs of {block}, so choose a smaller tensor_parallel_size"
            )

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Repack as ``gemm``, which is what the rest of this layer reads."""
        codes, zeros, scales = self.unpacked(module)
        groups = self.groups
        for name, data in (
            ("qweight", pack(codes.t())),
            ("qzeros", pack(zeros[:groups])),
            ("scales", scales[:groups].contiguous()),
        ):
            replace_parameter(module, name, data)
        super().process_weights_after_loading(module)

    def unpacked(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Codes ``[out, in]``, and zero points and scales ``[padded groups, out]``."""
        zeros = _nibbles(module.get_parameter("qzeros").data)
        scales = module.get_parameter("scales").data
        return _nibbles(module.get_parameter("qweight").data), zeros.t(), scales.t()


class GemvFastLinear(GemvLinear):
    """Rows that alternate, and zero points that are multiplied already."""

    def register_stored(self, module: nn.Module, out: int, groups: int) -> None:
        size = self.inputs.size
        self._check_inputs(RUN)
        packed = empty_weight(
            (out // 4, size), torch.int16, output_dim=0, output_block=4, input_dim=1
        )
        module.register_parameter("qweight", packed)
        padded = padded_words(self.inputs.total, self.group) * 8
        for name in ("qzeros", "scales"):
            steps = empty_weight((padded, out), scale_dtype(self.dtype), output_dim=1)
            module.register_parameter(name, steps)
        self.groups = groups

    def unpacked(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        words = module.get_parameter("qweight").data.to(torch.int32)
        shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
        nibbles = ((words[..., None] >> shifts) & 15).flatten(1)
        rows = nibbles.unflatten(1, (-1, 4, RUN)).transpose(1, 2).flatten(2).flatten(0, 1)
        lanes = rows.unflatten(1, (-1, 4, 2, 4)).transpose(
            -1, -2
        )  # even inputs came before odd ones
        codes = lanes.transpose(-3, -2).flatten(1)
        scales = module.get_parameter("scales").data
        products = module.get_parameter("qzeros").data.float()
        divisors = scales.float()
        zeros = (-products / torch.where(divisors == 0, 1, divisors)).round().clamp(0, 15)
        return codes, zeros, scales


def _nibbles(words: Tensor) -> Tensor:
    """int32 ``[rows, words]`` to ``[rows, 8 · words]``, from the lowest."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(1)
