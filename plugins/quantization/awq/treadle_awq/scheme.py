"""The scheme and the linear layer of AWQ checkpoints."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle.errors import ConfigError
from treadle_awq.config import AwqConfig
from treadle_awq.packing import dequantize, unpack
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import DequantizedLinear, replace_parameter
from treadle_layers_kit.int4_packing import Int4Module, Int4Packing
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme

__all__ = ("AwqLinear", "AwqScheme", "scale_dtype")

# AutoAWQ quantizes the layers of a decoder and never its head.
HEADS = ("lm_head",)


class AwqScheme(LinearScheme):
    """What the ``quantization_config`` of an AWQ checkpoint means for its layers."""

    name = "awq"

    def __init__(self, config: AwqConfig, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        if is_layer_skipped(spec, (*HEADS, *self.config.unquantized)):
            return None
        if self.config.layout == "gemm":
            return AwqLinear(self.config.group_size, self._cuda)
        from treadle_awq.gemv import GemvFastLinear, GemvLinear

        linear = GemvLinear if self.config.layout == "gemv" else GemvFastLinear
        return linear(self.config.group_size, self._cuda)


class AwqLinear(DequantizedLinear):
    """``x @ W.T + bias`` with ``W`` in four bits.

    The weight is brought into the layout of whatever kernels there are for it (``Int4Packing``). Where there
    are none, it stays as in the checkpoint and is dequantized for each call.
    """

    def __init__(self, group_size: int, cuda: bool = False) -> None:
        self.group = group_size
        self.cuda = cuda
        self.int4: Int4Module | None = None

    def register(self, module: nn.Module, out: int) -> None:
        inputs = self.inputs
        if self.group == -1:
            self.group = inputs.total
        self.check_groups(self.group)
        if uneven := [n for n in self.sizes if n % 8]:
            raise ConfigError(
                f"{self.prefix} has {uneven[0]} output features on each rank; AWQ packs 8 into one "
                "word, so choose a smaller tensor_parallel_size"
            )
        self.packing = Int4Packing(module, inputs.size, self.group, self.dtype, cuda=self.cuda)
        self.register_stored(module, out, inputs.total // self.group)

    def register_stored(self, module: nn.Module, out: int, groups: int) -> None:
        """Register the parameters in the layout of the checkpoint, which has so many groups."""
        packed = empty_weight(
            (self.inputs.size, out // 8), torch.int32, output_dim=1, output_block=8, input_dim=0
        )
        # Every rank gets the scales of all groups, because its inputs may begin inside a group.
        zeros = empty_weight((groups, out // 8), torch.int32, output_dim=1, output_block=8)
        scales = empty_weight((groups, out), scale_dtype(self.dtype), output_dim=1)
        module.register_parameter("qweight", packed)
        module.register_parameter("qzeros", zeros)
        module.register_parameter("scales", scales)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Unpack the zero points, and keep the scales of this rank's inputs only."""
        qweight, scales = module.get_parameter("qweight").data, module.get_parameter("scales").data
        zeros = unpack(module.get_parameter("qzeros").data).to(scales.dtype)
        inputs = qweight.shape[0]
        # Where a share begins or ends inside a group, smaller groups of equal scales are exact.
        group = gcd(self.group, self.inputs.start, inputs)
        first_group, num_groups = self.inputs.start // group, inputs // group
        scales, zeros = (
            t.repeat_interleave(self.group // group, dim=0)[
                first_group : first_group + num_groups
            ].contiguous()
            for t in (scales, zeros)
        )
        self.group = group
        del module.qzeros, module.scales

        def columns(begin: int, end: int) -> Tensor:
            return unpack(qweight[:, begin // 8 : -(-end // 8)])

        self.int4 = self.packing.pack(columns, scales, zeros, group)
        if self.int4 is not None:
            del module.qweight
            module.add_module("int4", self.int4)
            return
        if scales.device.type == "cpu":
            scales, zeros = scales.float(), zeros.float()  # float16 is slow there
        replace_parameter(module, "scales", scales)
        replace_parameter(module, "zeros", zeros)
        self.repack_codes(
            module, 4, lambda *outputs: columns(*outputs).t(), scales.t(), zeros.t(), group
        )

    def dense(self, module: Any) -> Tensor:
        weight = (module.qweight, module.scales, module.zeros, self.group)
        return dequantize(*weight, torch.float32).t()

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.int4 is None:
            return super().apply(module, x, bias)
        y: Tensor = self.int4(x)
        return y if bias is None else y + bias


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """float16, which is what the checkpoints have, unless the model computes in float32."""
    return torch.float32 if dtype is torch.float32 else torch.float16
