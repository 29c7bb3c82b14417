"""What the ``quantization_config`` of a GPTQ checkpoint means for its layers."""

from __future__ import annotations

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle_gptq.config import GptqConfig
from treadle_gptq.linear import SPARE_BIAS, GptqLinear
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme, stored_alike

__all__ = ("GptqScheme",)

HEADS = ("lm_head",)


class GptqScheme(LinearScheme):
    """Also ``SupportsWeightRenaming``: some writers give every layer a bias of zeros."""

    name = "gptq"

    def __init__(self, config: GptqConfig, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"
        self._without_bias: set[str] = set()

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        heads = () if self.config.head else HEADS
        if is_layer_skipped(spec, (*heads, *self.config.unquantized)):
            return None
        packing = stored_alike(spec, self.config.packing)
        if packing is None:
            return None
        if not spec.bias:
            self._without_bias.update(spec.names)
        config = self.config
        return GptqLinear(
            packing, config.zero_offset, self._cuda, sym=config.sym and not config.rules
        )

    def rename(self, name: str) -> str:
        """A bias that the model does not have goes where its being zero is checked."""
        path, _, leaf = name.rpartition(".")
        return f"{path}.{SPARE_BIAS}" if leaf == "bias" and path in self._without_bias else name
