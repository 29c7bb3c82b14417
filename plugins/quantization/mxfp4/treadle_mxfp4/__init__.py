"""Checkpoints of MXFP4, as GPT-OSS stores its experts, for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import impl

if TYPE_CHECKING:
    from treadle.api.models import QuantizationScheme

__all__ = ("treadle_quantization",)

KEY = "mxfp4"


@impl
def treadle_quantization(method: str, checkpoint: Mapping[str, Any]) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of an MXFP4 checkpoint."""
    if method != KEY:
        return None
    from treadle_mxfp4.scheme import Mxfp4Scheme, read_config

    return Mxfp4Scheme(read_config(checkpoint))
