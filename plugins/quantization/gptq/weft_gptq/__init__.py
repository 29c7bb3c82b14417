"""GPTQ checkpoints for weft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.api.cache import DeviceInfo
from weft.api.hookspecs import impl
from weft.api.matching import Match, ModelTraits
from weft.api.models import QuantizationScheme

__all__ = ("weft_match", "weft_quantization")

KEYS = ("gptq", "gptq_marlin")


@impl
def weft_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of a GPTQ checkpoint."""
    if method not in KEYS:
        return None
    from weft_gptq.config import read_config
    from weft_gptq.scheme import GptqScheme

    return GptqScheme(read_config(checkpoint), device)


@impl
def weft_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """A configuration that names no method, as early GPTQ tools wrote it."""
    found = model.config.get("quantization_config") or {}
    if (kind, key) == ("quantization", "gptq") and {
        "bits",
        "group_size",
        "desc_act",
    } <= found.keys():
        return Match(100, "quantization_config has bits, group_size and desc_act")
    return None
