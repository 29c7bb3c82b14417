"""FP8 checkpoints for weft, and FP8 weights made while loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.api.cache import DeviceInfo
from weft.api.hookspecs import impl
from weft.api.models import QuantizationScheme

__all__ = ("weft_quantization",)

KEYS = ("fp8", "fbgemm_fp8", "ptpc_fp8")


@impl
def weft_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of an FP8 checkpoint; quantize one that has none."""
    if method not in KEYS:
        return None
    from weft_fp8.config import read_config
    from weft_fp8.scheme import Fp8Scheme

    return Fp8Scheme(read_config(method, checkpoint), device)
