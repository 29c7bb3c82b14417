"""What the ``quantization_config`` of a GPTQ checkpoint means for its layers."""

from __future__ import annotations

from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle.errors import UnsupportedModelError
from treadle_gptq.config import GptqConfig
from treadle_gptq.gemm import create_gemm
from treadle_gptq.linear import SPARE_BIAS, GptqLinear
from treadle_layers_kit.quantized import is_layer_skipped

__all__ = ("GptqScheme",)

HEADS = ("lm_head",)


class GptqScheme:
    """Also ``SupportsWeightRenaming``: some writers give every layer a bias of zeros."""

    name = "gptq"

    def __init__(self, config: GptqConfig, device: DeviceInfo) -> None:
        self.config = config
        self._gemm, self._cuda = create_gemm(device), device.type == "cuda"
        self._without_bias: set[str] = set()

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        heads = () if self.config.head else HEADS
        if is_layer_skipped(spec, (*heads, *self.config.unquantized)):
            return None
        packings = {name: self.config.packing(name) for name in spec.names}
        packing = packings[spec.names[0]]
        if any(candidate != packing for candidate in packings.values()):
            raise UnsupportedModelError(
                f"{spec.prefix} fuses matrices that the checkpoint quantizes differently: "
                + ", ".join(f"{name} ({p or 'not at all'})" for name, p in packings.items())
            )
        if packing is None:
            return None
        if not spec.bias:
            self._without_bias.update(spec.names)
        config = self.config
        return GptqLinear(
            packing, config.zero_offset, self._gemm, self._cuda, sym=config.sym and not config.rules
        )

    def rename(self, name: str) -> str:
        """A bias that the model does not have goes where its being zero is checked."""
        path, _, leaf = name.rpartition(".")
        return f"{path}.{SPARE_BIAS}" if leaf == "bias" and path in self._without_bias else name

    def experts_method(self, spec: Any) -> None:
        return None

    def kv_cache_dtype(self, layer: str) -> None:
        return None
