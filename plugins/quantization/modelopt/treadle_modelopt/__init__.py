"""Checkpoints of NVIDIA ModelOpt for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.hookspecs import impl
from treadle.api.models import QuantizationScheme

__all__ = ("treadle_quantization",)

KEYS = ("modelopt", "modelopt_fp4")


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the configuration of a checkpoint of ModelOpt."""
    if method not in KEYS:
        return None
    from treadle_modelopt.scheme import ModelOptScheme, read_config

    return ModelOptScheme(read_config(checkpoint), device)
