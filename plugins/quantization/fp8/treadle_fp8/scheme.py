"""What the ``quantization_config`` of an FP8 checkpoint means for its layers."""

from __future__ import annotations

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle_fp8.config import Fp8Config
from treadle_fp8.linear import GatedFp8Linear, OnlineLinear
from treadle_fp8_kit.scaled_mm import ScaledMM
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme

__all__ = ("Fp8Scheme",)

# DeepSeek's checkpoints do not list their head, and it is never quantized.
HEADS = ("lm_head",)
# transformers calls the scale of a whole matrix, and of activations, otherwise than AutoFP8 does.
NAMES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
# Scales of what treadle keeps in the model's type, with or without a cache in FP8. Those of the cache
# itself are found by the attention block.
UNUSED = ("q_scale", "prob_output_scale", "input_scale_ub")


class Fp8Scheme(LinearScheme):
    """Also ``SupportsWeightRenaming``, because writers disagree about names."""

    name = "fp8"

    def __init__(self, config: Fp8Config, device: DeviceInfo) -> None:
        self.config = config
        self._scaled_mm = ScaledMM(device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        config = self.config
        if is_layer_skipped(spec, (*HEADS, *config.unquantized)):
            return None
        method = OnlineLinear if config.online else GatedFp8Linear
        return method(
            config.scales, config.block, self._scaled_mm, static=config.static, limit=config.limit
        )

    def rename(self, name: str) -> str | None:
        path, _, leaf = name.rpartition(".")
        leaf = NAMES.get(leaf, leaf)
        if self.config.online:
            return name
        cached = path.endswith(("k_proj", "v_proj"))
        if leaf in UNUSED or (leaf == "output_scale" and not cached):
            return None
        if leaf == "input_scale" and not self.config.static:
            return None
        return f"{path}.{leaf}"
