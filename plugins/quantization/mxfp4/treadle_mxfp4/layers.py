"""Linear layers and experts of blocks of 32 numbers with an exponent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle.errors import CheckpointError, ConfigError
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import DequantizedLinear
from treadle_layers_kit.dequantized_experts import DequantizedExperts
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import E2M1, codes_of_bytes
from treadle_layers_kit.small_floats import fp4_to_float32

__all__ = ("BLOCK", "Mxfp4Experts", "Mxfp4Linear", "dequantize")

BLOCK = 32


class Mxfp4Linear(DequantizedLinear):
    """``blocks`` uint8 ``[out, in / 32, 16]`` and ``scales`` uint8 ``[out, in / 32]``."""

    def register(self, module: nn.Module, out: int) -> None:
        if self.inputs.total % BLOCK:
            raise CheckpointError(
                f"{self.prefix} has {self.inputs.total} input features, which are no blocks of {BLOCK}; "
                "this layer cannot be MXFP4, see modules_to_not_convert"
            )
        _register(module, "", out, self.inputs.size, self.prefix)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        blocks = module.get_parameter("blocks").data.flatten(1)
        self.repack(
            module, E2M1, lambda begin, end: codes_of_bytes(blocks[begin:end], 4),
            module.get_parameter("scales").data, BLOCK,
        )  # fmt: skip

    def dense(self, module: Any) -> Tensor:
        return dequantize(module.blocks, module.scales)


class Mxfp4Experts(DequantizedExperts):
    """Both stacks with a leading dimension of experts."""

    def register(self, module: nn.Module, stack: str, out: int, inputs: int) -> None:
        _register(module, f"{stack}_", out, inputs, self.spec.prefix, self.spec.experts)

    def packed(self, module: Any, stack: str, expert: int) -> PackedWeight | None:
        blocks = getattr(module, f"{stack}_blocks")[expert].flatten(1)
        scales = getattr(module, f"{stack}_scales")[expert]
        return PackedWeight.pack(
            lambda begin, end: codes_of_bytes(blocks[begin:end], 4), scales, BLOCK, 2 * blocks.shape[1],
            self.spec.dtype, E2M1,
        )  # fmt: skip

    def matrix(self, module: Any, stack: str, expert: int) -> Tensor:
        blocks, scales = (getattr(module, f"{stack}_{leaf}") for leaf in ("blocks", "scales"))
        return dequantize(blocks[expert], scales[expert])


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 ``[out, in]`` of the two."""
    numbers = fp4_to_float32(blocks.flatten(0, 1)).view(*scales.shape, BLOCK)
    powers = scales.view(torch.float8_e8m0fnu).float()
    return numbers.mul_(powers[..., None]).flatten(1)


def _register(
    module: nn.Module, stem: str, out: int, inputs: int, prefix: str, experts: int = 0
) -> None:
    if inputs % BLOCK:
        raise ConfigError(
            f"{prefix} has {inputs} input features on each rank; MXFP4 has blocks of {BLOCK}, so choose a "
            "smaller tensor_parallel_size"
        )
    stack = (experts,) if experts else ()
    for leaf, shape in (("blocks", (out, inputs // BLOCK, 16)), ("scales", (out, inputs // BLOCK))):
        parameter = empty_weight(
            (*stack, *shape), torch.uint8,
            output_dim=0, input_dim=1, input_block=BLOCK, stack=experts,
        )  # fmt: skip
        module.register_parameter(f"{stem}{leaf}", parameter)
