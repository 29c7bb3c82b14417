"""What the ``quantization_config`` of an FP8 checkpoint means for its layers."""

from __future__ import annotations

from typing import Any

from weft.api.cache import DeviceInfo
from weft.api.models import LinearMethod, LinearSpec
from weft.layers.quantized import left_alone
from weft_fp8.config import Fp8Config
from weft_fp8.linear import BlockLinear, ChannelLinear, MatrixLinear, OnlineLinear
from weft_fp8.native import Native

__all__ = ("Fp8Scheme",)

# DeepSeek's checkpoints do not list their head, and it is never quantized.
HEADS = ("lm_head",)
# transformers calls the scale of a whole matrix, and of activations, otherwise than AutoFP8 does.
NAMES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
# Scales of a cache in FP8. The cache has the model's type here, and so needs none.
CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale", "output_scale")


class Fp8Scheme:
    """Also a ``TensorNames``, because writers disagree about names."""

    name = "fp8"

    def __init__(self, config: Fp8Config, device: DeviceInfo) -> None:
        self.config = config
        self._native = Native(device)

    def linear(self, spec: LinearSpec) -> LinearMethod | None:
        config = self.config
        if left_alone(spec, (*HEADS, *config.unquantized)):
            return None
        if config.online:
            return OnlineLinear(self._native)
        if config.scales == "block":
            return BlockLinear(config.block, self._native)
        if config.scales == "channel":
            return ChannelLinear(self._native, config.limit)
        return MatrixLinear(self._native, static=config.static)

    def rename(self, name: str) -> str | None:
        path, _, leaf = name.rpartition(".")
        leaf = NAMES.get(leaf, leaf)
        if self.config.online:
            return name
        if leaf in CACHE or leaf == "input_scale_ub":
            return None
        if leaf == "input_scale" and not self.config.static:
            return None
        return f"{path}.{leaf}"

    def experts(self, spec: Any) -> None:
        return None

    def kv_dtype(self, layer: str) -> None:
        return None
