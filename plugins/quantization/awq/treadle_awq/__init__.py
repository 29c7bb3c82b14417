"""AWQ checkpoints for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.hookspecs import impl
from treadle.api.matching import Match, ModelTraits
from treadle.api.models import QuantizationScheme

__all__ = ("treadle_match", "treadle_quantization")

KEYS = ("awq", "awq_marlin")


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of an AWQ checkpoint."""
    if method not in KEYS:
        return None
    from treadle_awq.config import read_config
    from treadle_awq.scheme import AwqScheme

    return AwqScheme(read_config(checkpoint), device)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """A configuration that names no method, as llm-awq writes it."""
    quant_config = model.config.get("quantization_config") or {}
    if (kind, key) == ("quantization", "awq") and {"w_bit", "q_group_size"} <= quant_config.keys():
        return Match(100, "quantization_config has w_bit and q_group_size")
    return None
