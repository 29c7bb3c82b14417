"""Models in one GGUF file for treadle: where it is, what it says, its tensors and their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import impl

if TYPE_CHECKING:
    from treadle.api.cache import DeviceInfo
    from treadle.api.files import ModelFiles, ModelSource, WeightLoader
    from treadle.api.models import QuantizationScheme

__all__ = ("treadle_load_format", "treadle_model_source", "treadle_quantization")

KEY = "gguf"


@impl
def treadle_model_source(scheme: str) -> ModelSource | None:
    """Find a file and write its configuration, tokenizer and chat template beside each other."""
    if scheme != KEY:
        return None
    from treadle_gguf.source import GgufSource

    return GgufSource()


@impl
def treadle_load_format(format: str, files: ModelFiles) -> WeightLoader | None:
    """Open the weights of the file that the source has found."""
    if format != KEY:
        return None
    from treadle_gguf.loader import GgufLoader

    return GgufLoader(files)


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Read the types of the tensors, which the source has written into the configuration."""
    if method != KEY:
        return None
    from treadle_gguf.scheme import GgufScheme

    return GgufScheme.read(checkpoint)
