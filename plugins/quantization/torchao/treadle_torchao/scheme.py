"""What the ``quantization_config`` of torchao means for the layers of a model."""

from __future__ import annotations

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle_fp8_kit.scaled_mm import ScaledMM
from treadle_layers_kit.affine import AffineLinear, RoundedAffineLinear, stored_bits
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme, stored_alike
from treadle_layers_kit.small_floats import Fp8Linear
from treadle_torchao.config import Config

__all__ = ("TorchAoScheme",)

# transformers leaves the head alone unless it is told otherwise.
HEADS = ("lm_head",)


class TorchAoScheme(LinearScheme):
    """A ``QuantizationScheme``: layers by name, or all alike."""

    name = "torchao"

    def __init__(self, config: Config, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"
        self._scaled_mm = ScaledMM(device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        if is_layer_skipped(spec, (*HEADS, *self.config.unquantized)):
            return None
        weights = stored_alike(spec, self.config.weights)
        if weights is None:
            return None
        if weights.kind == "fp8":
            fp8 = self._scaled_mm if weights.rounds_inputs else None
            return Fp8Linear("block" if weights.block[1] else "channel", weights.block, fp8)
        if weights.inputs is not None:
            return RoundedAffineLinear(weights.group, weights.inputs, self._scaled_mm)
        return AffineLinear(stored_bits(weights.bits), weights.group, cuda=self._cuda)
