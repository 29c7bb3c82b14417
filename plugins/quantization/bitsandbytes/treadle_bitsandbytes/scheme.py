"""What the ``quantization_config`` of bitsandbytes means for the layers of a model."""

from __future__ import annotations

from treadle.api.models import LinearMethod, LinearSpec
from treadle_bitsandbytes.config import FOUR_BITS, Config
from treadle_bitsandbytes.linear import FourBitLinear, Int8Linear
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme

__all__ = ("BitsAndBytesScheme",)

# transformers never quantizes the head unless a list of what to skip leaves it out.
HEADS = ("lm_head",)
SCALES, FORMAT = ".weight.absmax", ".weight_format"


class BitsAndBytesScheme(LinearScheme):
    """Also ``SupportsWeightRenaming``: scales have the names of what they belong to."""

    name = "bitsandbytes"

    def __init__(self, config: Config) -> None:
        self.config = config

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        config = self.config
        if is_layer_skipped(spec, (*HEADS, *config.unquantized)):
            return None
        if config.type in FOUR_BITS:
            return FourBitLinear(config.type, online=config.online)
        return Int8Linear(online=config.online)

    def rename(self, name: str) -> str | None:
        if name.endswith(FORMAT):
            return None
        return f"{name.removesuffix(SCALES)}.absmax" if name.endswith(SCALES) else name
