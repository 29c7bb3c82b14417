"""FP8 checkpoints for treadle, and FP8 weights made while loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.hookspecs import impl
from treadle.api.models import QuantizationScheme

__all__ = ("treadle_quantization",)

KEYS = ("fp8", "fbgemm_fp8", "ptpc_fp8")


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of an FP8 checkpoint; quantize one that has none."""
    if method not in KEYS:
        return None
    from treadle_fp8.config import read_config
    from treadle_fp8.scheme import Fp8Scheme

    return Fp8Scheme(read_config(method, checkpoint), device)
