"""Checkpoints of llm-compressor (compressed-tensors) for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.hookspecs import impl
from treadle.api.models import QuantizationScheme

__all__ = ("treadle_quantization",)

KEY = "compressed-tensors"


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of a checkpoint of llm-compressor."""
    if method != KEY:
        return None
    from treadle_compressed_tensors.config import read_config
    from treadle_compressed_tensors.scheme import CompressedTensorsScheme

    return CompressedTensorsScheme(read_config(checkpoint), device)
