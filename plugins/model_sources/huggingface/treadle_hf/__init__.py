"""The model source ``hf``: checkpoints of the Hugging Face hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import ModelSource

__all__ = ("treadle_model_source",)


@impl
def treadle_model_source(scheme: str) -> ModelSource | None:
    """Open the scheme ``hf``, which is also that of names without a scheme."""
    if scheme != "hf":
        return None
    from treadle_hf.source import HubSource

    return HubSource()
