"""Checkpoints of AMD Quark (FP8, integers, MXFP4) for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import impl

if TYPE_CHECKING:
    from treadle.api.cache import DeviceInfo
    from treadle.api.files import ModelFiles, WeightLoader
    from treadle.api.models import QuantizationScheme

__all__ = ("treadle_load_format", "treadle_quantization")

KEY = "quark"


@impl
def treadle_load_format(format: str, files: ModelFiles) -> WeightLoader | None:
    """Open safetensors in which Quark has stored matrices."""
    if format != KEY:
        return None
    from treadle_quark.config import read_config
    from treadle_quark.loader import quark_loader
    from treadle_weights_kit.repacked import open_repacked

    return open_repacked(files, quark_loader, read_config)


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of a checkpoint of Quark."""
    if method != KEY:
        return None
    from treadle_quark.config import read_config
    from treadle_quark.scheme import QuarkScheme

    return QuarkScheme(read_config(checkpoint), device)
