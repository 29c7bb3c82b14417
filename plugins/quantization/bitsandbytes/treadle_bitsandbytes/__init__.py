"""Checkpoints of bitsandbytes (NF4, FP4, LLM.int8) for treadle, and weights quantized so while loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from treadle.api.hookspecs import Options, impl
from treadle.api.matching import Match, ModelTraits

if TYPE_CHECKING:
    from treadle.api.files import ModelFiles, WeightLoader
    from treadle.api.models import QuantizationScheme

__all__ = ("TREADLE_OPTIONS", "treadle_load_format", "treadle_match", "treadle_quantization")

KEY = "bitsandbytes"


class BitsAndBytesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``quantization:bitsandbytes``."""

    type: Annotated[
        Literal["nf4", "fp4", "int8"],
        Meta(description="How a checkpoint that is not quantized is quantized while it is loaded."),
    ] = "nf4"


TREADLE_OPTIONS = {"quantization:bitsandbytes": BitsAndBytesOptions}


@impl
def treadle_load_format(format: str, files: ModelFiles) -> WeightLoader | None:
    """Open safetensors in which bitsandbytes has stored matrices."""
    if format != KEY:
        return None
    from treadle_bitsandbytes.loader import BitsAndBytesLoader

    return BitsAndBytesLoader.open(files)


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], options: Options
) -> QuantizationScheme | None:
    """Read the ``quantization_config`` of bitsandbytes; quantize a checkpoint that has none."""
    if method != KEY:
        return None
    from treadle_bitsandbytes.config import read_config
    from treadle_bitsandbytes.scheme import BitsAndBytesScheme

    return BitsAndBytesScheme(read_config(checkpoint, options["type"]))


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """A configuration that names no method, as transformers wrote it at first."""
    stored = model.config.get("quantization_config") or {}
    if (kind, key) == ("quantization", KEY) and stored.get("load_in_8bit") is True:
        return Match(100, "quantization_config has load_in_8bit")
    return None
