"""GPTQ checkpoints for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.hookspecs import impl
from treadle.api.matching import Match, ModelTraits
from treadle.api.models import QuantizationScheme

__all__ = ("treadle_match", "treadle_quantization")

KEYS = ("gptq", "gptq_marlin", "auto-round")


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of a GPTQ checkpoint."""
    if method not in KEYS:
        return None
    from treadle_gptq.config import read_config
    from treadle_gptq.scheme import GptqScheme

    return GptqScheme(read_config(checkpoint), device)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """A configuration that names no method, as early GPTQ tools wrote it."""
    quant_config = model.config.get("quantization_config") or {}
    if (kind, key) == ("quantization", "gptq") and {
        "bits",
        "group_size",
        "desc_act",
    } <= quant_config.keys():
        return Match(100, "quantization_config has bits, group_size and desc_act")
    return None
