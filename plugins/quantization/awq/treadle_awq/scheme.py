"""The scheme and the linear layer of AWQ checkpoints."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle.errors import CheckpointError, ConfigError
from treadle_awq.config import AwqConfig
from treadle_awq.packing import dequantize, unpack
from treadle_layers_kit import Shard, Sharded, empty_weight
from treadle_layers_kit.int4_packing import Int4Module, Int4Packing
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme

__all__ = ("AwqLinear", "AwqScheme", "frozen_parameter", "scale_dtype")

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


class AwqLinear:
    """``x @ W.T + bias`` with ``W`` in four bits.

    The weight is brought into the layout of whatever kernels there are for it (``Int4Packing``). Where there
    are none, it stays as in the checkpoint and is dequantized for each call.
    """

    def __init__(self, group_size: int, cuda: bool = False) -> None:
        self.group = group_size
        self.first = 0
        self.cuda = cuda
        self.int4: Int4Module | None = None

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        inputs = module.inputs if isinstance(module, Sharded) else Shard.full(spec.in_features)
        if self.group == -1:
            self.group = inputs.total
        if inputs.total % self.group:
            raise CheckpointError(
                f"{spec.prefix} has {inputs.total} input features, which groups of {self.group} do "
                "not divide; check group_size in quantization_config"
            )
        if uneven := [n for n in spec.out_features if n % 8]:
            raise ConfigError(
                f"{spec.prefix} has {uneven[0]} output features on each rank; AWQ packs 8 into one "
                "word, so choose a smaller tensor_parallel_size"
            )
        self.first = inputs.start
        self.packing = Int4Packing(module, spec.in_features, self.group, spec.dtype, cuda=self.cuda)
        self.register(module, spec, inputs)

    def register(self, module: nn.Module, spec: LinearSpec, inputs: Shard) -> None:
        """Register the parameters in the layout of the checkpoint."""
        out, groups = sum(spec.out_features), inputs.total // self.group
        packed = empty_weight(
            (spec.in_features, out // 8), torch.int32, output_dim=1, output_block=8, input_dim=0
        )
        # Every rank gets the scales of all groups, because its inputs may begin inside a group.
        zeros = empty_weight((groups, out // 8), torch.int32, output_dim=1, output_block=8)
        scales = empty_weight((groups, out), scale_dtype(spec.dtype), output_dim=1)
        module.register_parameter("qweight", packed)
        module.register_parameter("qzeros", zeros)
        module.register_parameter("scales", scales)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Unpack the zero points, and keep the scales of this rank's inputs only."""
        qweight, scales = module.get_parameter("qweight").data, module.get_parameter("scales").data
        zeros = unpack(module.get_parameter("qzeros").data).to(scales.dtype)
        inputs = qweight.shape[0]
        # Where a share begins or ends inside a group, smaller groups of equal scales are exact.
        group = gcd(self.group, self.first, inputs)
        first_group, num_groups = self.first // group, inputs // group
        scales, zeros = (
            t.repeat_interleave(self.group // group, dim=0)[
                first_group : first_group + num_groups
            ].contiguous()
            for t in (scales, zeros)
        )
        self.group = group
        del module.qzeros, module.scales
        self.int4 = self.packing.pack(
            lambda begin, end: unpack(qweight[:, begin // 8 : -(-end // 8)]), scales, zeros, group
        )
        if self.int4 is not None:
            del module.qweight
            module.add_module("int4", self.int4)
            return
        if scales.device.type == "cpu":
            scales, zeros = scales.float(), zeros.float()  # float16 is slow there
        module.register_parameter("scales", frozen_parameter(scales))
        module.register_parameter("zeros", frozen_parameter(zeros))

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.int4 is not None:
            y: Tensor = self.int4(x)
        else:
            y = x @ dequantize(module.qweight, module.scales, module.zeros, self.group, x.dtype)
        return y if bias is None else y + bias


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """float16, which is what the checkpoints have, unless the model computes in float32."""
    return torch.float32 if dtype is torch.float32 else torch.float16


def frozen_parameter(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)
