"""What the ``quantization_config`` of HQQ means for the layers of a model."""

from __future__ import annotations

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle_hqq.config import Config, Weights
from treadle_layers_kit.affine import AffineLinear, stored_bits
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme, stored_alike

__all__ = ("HqqScheme",)

# HQQ patches the layers of a decoder and never its head.
HEADS = ("lm_head",)


class HqqScheme(LinearScheme):
    """A ``QuantizationScheme``: every linear layer, or those that ``dynamic_config`` names."""

    name = "hqq"

    def __init__(self, config: Config, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        if is_layer_skipped(spec, (*HEADS, *self.config.unquantized)):
            return None
        weights = stored_alike(spec, self._weights)
        if weights is None:
            return None
        return AffineLinear(stored_bits(weights.bits), weights.group, cuda=self._cuda)

    def _weights(self, name: str) -> Weights | None:
        if self.config.default is not None:
            return self.config.default
        tags = (tag for tag in self.config.layers if f".{name}".endswith(f".{tag}"))
        return next((self.config.layers[tag] for tag in tags), None)
