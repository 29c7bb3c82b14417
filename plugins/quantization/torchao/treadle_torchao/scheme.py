"""What the ``quantization_config`` of torchao means for the layers of a model."""

from __future__ import annotations

from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle.errors import UnsupportedModelError
from treadle_fp8_kit.scaled_mm import ScaledMM
from treadle_layers_kit.affine import AffineLinear, stored_bits
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.small_floats import Fp8Linear
from treadle_torchao.config import Config

__all__ = ("TorchAoScheme",)

# transformers leaves the head alone unless it is told otherwise.
HEADS = ("lm_head",)


class TorchAoScheme:
    """A ``QuantizationScheme``: layers by name, or all alike."""

    name = "torchao"

    def __init__(self, config: Config, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"
        self._fp8 = ScaledMM(device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        if is_layer_skipped(spec, (*HEADS, *self.config.unquantized)):
            return None
        stored = {name: self.config.weights(name) for name in spec.names}
        weights = stored[spec.names[0]]
        if any(other != weights for other in stored.values()):
            raise UnsupportedModelError(
                f"{spec.prefix} fuses matrices that the checkpoint stores differently: "
                + ", ".join(f"{name} ({w or 'in full'})" for name, w in stored.items())
            )
        if weights is None:
            return None
        if weights.kind == "fp8":
            fp8 = self._fp8 if weights.rounds_inputs else None
            return Fp8Linear("block" if weights.block[1] else "channel", weights.block, fp8)
        return AffineLinear(stored_bits(weights.bits), weights.group, cuda=self._cuda)

    def experts_method(self, spec: Any) -> None:
        return None

    def kv_cache_dtype(self, layer: str) -> None:
        return None
