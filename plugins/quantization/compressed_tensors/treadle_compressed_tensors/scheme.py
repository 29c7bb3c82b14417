"""What the ``quantization_config`` of llm-compressor means for the layers of a model."""

from __future__ import annotations

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle_compressed_tensors.config import Config, Weights
from treadle_compressed_tensors.integers import IntLinear, RoundedIntLinear
from treadle_fp8_kit.scaled_mm import ScaledMM
from treadle_layers_kit.schemes import LinearScheme, stored_alike
from treadle_layers_kit.small_floats import Fp4Linear, Fp8Linear

__all__ = ("CompressedTensorsScheme",)

# Shapes that are known, and scales of activations, which stay in the model's type or have one for each row.
UNUSED = ("weight_shape", "input_scale", "input_zero_point", "input_global_scale")
STATIC = ("input_scale", "input_zero_point")
CACHED = ("k_proj", "v_proj", "qkv_proj")


class CompressedTensorsScheme(LinearScheme):
    """Also ``SupportsWeightRenaming``: tensors that say nothing about weights are not read."""

    name = "compressed-tensors"

    def __init__(self, config: Config, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"
        self._scaled_mm = ScaledMM(device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        weights = stored_alike(spec, self.config.weights)
        return None if weights is None else self._method(weights)

    def _method(self, weights: Weights) -> LinearMethod:
        match weights.kind:
            case "fp8":
                fp8 = self._scaled_mm if weights.rounds_inputs else None
                return Fp8Linear(weights.strategy, weights.block, fp8)  # type: ignore[arg-type]
            case "int8" if weights.inputs is not None:
                return RoundedIntLinear(weights, weights.inputs, self._scaled_mm)
            case "nvfp4":
                return Fp4Linear(
                    weights.group_size, matrix_scale="weight_global_scale", divides=True
                )
            case "mxfp4":
                return Fp4Linear(weights.group_size)
            case _:
                return IntLinear(weights, cuda=self._cuda)

    def rename(self, name: str) -> str | None:
        path, _, leaf = name.rpartition(".")
        if leaf in STATIC and (weights := self.config.weights(path)) is not None:
            inputs = weights.inputs
            if inputs is not None and inputs.static and (leaf == STATIC[0] or not inputs.symmetric):
                return name
        if leaf in UNUSED or (leaf == "output_scale" and not path.endswith(CACHED)):
            return None
        if leaf == "weight_zero_point":  # earlier versions stored zeros for symmetric weights
            weights = self.config.weights(path)
            return None if weights is not None and weights.symmetric else name
        return name
