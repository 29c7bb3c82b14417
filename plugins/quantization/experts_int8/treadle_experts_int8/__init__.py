"""Experts in 8 bits, made while a checkpoint is loaded, for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import impl

if TYPE_CHECKING:
    from treadle.api.models import QuantizationScheme

__all__ = ("treadle_quantization",)

KEY = "experts_int8"


@impl
def treadle_quantization(method: str, checkpoint: Mapping[str, Any]) -> QuantizationScheme | None:
    """Quantize the experts of a checkpoint that is not quantized."""
    if method != KEY:
        return None
    from treadle_experts_int8.scheme import ExpertsInt8Scheme

    return ExpertsInt8Scheme(checkpoint)
