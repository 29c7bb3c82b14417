"""What the ``quantization_config`` of HQQ means for the layers of a model."""

from __future__ import annotations

from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle.errors import UnsupportedModelError
from treadle_hqq.config import Config, Weights
from treadle_layers_kit.affine import AffineLinear, stored_bits
from treadle_layers_kit.quantized import is_layer_skipped

__all__ = ("HqqScheme",)

# HQQ patches the layers of a decoder and never its head.
HEADS = ("lm_head",)


class HqqScheme:
    """A ``QuantizationScheme``: every linear layer, or those that ``dynamic_config`` names."""

    name = "hqq"

    def __init__(self, config: Config, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        if is_layer_skipped(spec, (*HEADS, *self.config.unquantized)):
            return None
        stored = {name: self._weights(name) for name in spec.names}
        weights = stored[spec.names[0]]
        if any(other != weights for other in stored.values()):
            raise UnsupportedModelError(
                f"{spec.prefix} fuses matrices that the checkpoint stores differently: "
                + ", ".join(f"{name} ({w or 'in full'})" for name, w in stored.items())
            )
        if weights is None:
            return None
        return AffineLinear(stored_bits(weights.bits), weights.group, cuda=self._cuda)

    def _weights(self, name: str) -> Weights | None:
        if self.config.default is not None:
            return self.config.default
        tags = (tag for tag in self.config.layers if f".{name}".endswith(f".{tag}"))
        return next((self.config.layers[tag] for tag in tags), None)

    def experts_method(self, spec: Any) -> None:
        return None

    def kv_cache_dtype(self, layer: str) -> None:
        return None
