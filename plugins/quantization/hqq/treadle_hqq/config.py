"""What an HQQ checkpoint says about itself: the ``HqqConfig`` of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_layers_kit.schemes import check_method, listed_names

__all__ = ("BITS", "Config", "Weights", "read_config")

KEY = "hqq"
BITS = (1, 2, 3, 4, 8)
PARAMS = "weight_quant_params"


@dataclass(frozen=True, slots=True)
class Weights:
    """``group`` inputs share a scale and a zero point; 0: all inputs do."""

    bits: int
    group: int


@dataclass(frozen=True, slots=True)
class Config:
    """``default`` is that of all layers, or ``None`` where ``layers`` name those that are quantized."""

    default: Weights | None
    layers: Mapping[str, Weights]
    unquantized: tuple[str, ...]


def read_config(checkpoint: Mapping[str, Any]) -> Config:
    """Read a ``quantization_config``.

    Raises ``ConfigError`` if the checkpoint is another's, ``UnsupportedModelError`` for a variant that
    this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    check_method(checkpoint, KEY)
    names = listed_names(checkpoint, "skip_modules")
    stored = checkpoint.get("quant_config")
    if not isinstance(stored, Mapping):
        raise CheckpointError(
            f"quant_config in quantization_config is {stored!r:.200}, not an object"
        )
    if PARAMS in stored:
        return Config(_weights(stored, "quant_config"), {}, names)
    layers = {tag: _weights(value, f"quant_config.{tag}") for tag, value in stored.items()}
    return Config(None, layers, names)


def _weights(stored: Any, where: str) -> Weights:
    params = stored.get(PARAMS) if isinstance(stored, Mapping) else None
    if not isinstance(params, Mapping):
        raise CheckpointError(f"{where} in quantization_config has no {PARAMS}")
    for key in ("scale_quant_params", "zero_quant_params"):
        if stored.get(key):
            raise UnsupportedModelError(
                f"{where} says {key}: safetensors of HQQ have no place for scales that are quantized "
                "themselves; quantize the model without quant_scale and quant_zero"
            )
    bits, group = params.get("nbits", 4), params.get("group_size", 64)
    if bits not in BITS or type(bits) is not int:
        raise UnsupportedModelError(
            f"{where} says nbits {bits!r}; treadle-hqq reads {', '.join(map(str, BITS))}"
        )
    if group is not None and (type(group) is not int or not 0 < group < 2**31):
        raise CheckpointError(f"{where} says group_size {group!r}; it must be a positive number")
    if params.get("channel_wise", True) is not True:
        raise UnsupportedModelError(
            f"{where} says channel_wise false: one scale for a whole matrix; quantize it with groups"
        )
    if params.get("axis", 0) != 1:
        raise UnsupportedModelError(
            f"{where} says axis {params.get('axis', 0)!r}: groups along the outputs, which no rank could "
            "share; quantize the model with axis 1, as transformers does"
        )
    return Weights(bits, group or 0)
