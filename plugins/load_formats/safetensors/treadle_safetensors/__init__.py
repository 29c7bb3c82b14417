"""The load format ``safetensors``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import ModelFiles, WeightLoader

__all__ = ("treadle_load_format",)


@impl
def treadle_load_format(format: str, files: ModelFiles) -> WeightLoader | None:
    """Open the weights of a checkpoint."""
    if format != "safetensors":
        return None
    from treadle_weights_kit.mapped import SafetensorsLoader

    return SafetensorsLoader(files)
