"""What a checkpoint of bitsandbytes says about itself: the ``BitsAndBytesConfig`` of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.errors import CheckpointError, ConfigError, UnsupportedModelError
from treadle_layers_kit.schemes import listed_names

__all__ = ("FOUR_BITS", "Config", "read_config")

KEY = "bitsandbytes"
FOUR_BITS = ("nf4", "fp4")


@dataclass(frozen=True, slots=True)
class Config:
    """``type`` is ``nf4``, ``fp4`` or ``int8``; ``online``: the checkpoint has the weights in full."""

    type: str
    unquantized: tuple[str, ...] = ()
    online: bool = False


def read_config(checkpoint: Mapping[str, Any], type: str = "nf4") -> Config:
    """Read a ``quantization_config``; ``type`` is how to quantize a checkpoint that has none.

    Raises ``ConfigError`` if the checkpoint is another's, ``UnsupportedModelError`` for a variant that
    this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    if not checkpoint:
        return Config(type, online=True)
    method = checkpoint.get("quant_method", KEY)
    if method != KEY:
        raise ConfigError(
            f"option quantization is {KEY!r}, but this checkpoint is quantized with {method!r}; leave "
            "the option out"
        )
    four, eight = (_flag(checkpoint, f"load_in_{bits}bit") for bits in (4, 8))
    if four == eight:
        raise CheckpointError(
            f"quantization_config says load_in_4bit {four} and load_in_8bit {eight}; one must be true"
        )
    if eight and _flag(checkpoint, "llm_int8_has_fp16_weight"):
        raise UnsupportedModelError(
            "quantization_config says llm_int8_has_fp16_weight: the weights are in full, for training; "
            "remove quantization_config from config.json and use --quantization bitsandbytes"
        )
    stored = "int8" if eight else checkpoint.get("bnb_4bit_quant_type", "fp4")
    if four and stored not in FOUR_BITS:
        raise UnsupportedModelError(
            f"quantization_config says bnb_4bit_quant_type {stored!r}; treadle-bitsandbytes reads "
            f"{', '.join(FOUR_BITS)}"
        )
    names = listed_names(checkpoint, "llm_int8_skip_modules")
    return Config(stored, names)


def _flag(checkpoint: Mapping[str, Any], key: str) -> bool:
    value = checkpoint.get(key, checkpoint.get(f"_{key}")) or False
    if not isinstance(value, bool):
        raise CheckpointError(
            f"quantization_config says {key} {value!r:.200}; it must be true or false"
        )
    return value
