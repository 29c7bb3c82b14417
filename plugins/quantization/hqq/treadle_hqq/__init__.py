"""Checkpoints of HQQ, of 1 to 8 bits, for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import impl

if TYPE_CHECKING:
    from treadle.api.cache import DeviceInfo
    from treadle.api.files import ModelFiles, WeightLoader
    from treadle.api.models import QuantizationScheme

__all__ = ("treadle_load_format", "treadle_quantization")

KEY = "hqq"


@impl
def treadle_load_format(format: str, files: ModelFiles) -> WeightLoader | None:
    """Open safetensors in which HQQ has stored matrices."""
    if format != KEY:
        return None
    from treadle_hqq.loader import hqq_loader
    from treadle_weights_kit.mapped import SafetensorsLoader

    return hqq_loader(SafetensorsLoader(files))


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of an HQQ checkpoint."""
    if method != KEY:
        return None
    from treadle_hqq.config import read_config
    from treadle_hqq.scheme import HqqScheme

    return HqqScheme(read_config(checkpoint), device)
