"""The model source ``newest``: the newest complete checkpoint in a folder of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import ModelSource

__all__ = ("treadle_model_source",)


@impl
def treadle_model_source(scheme: str) -> ModelSource | None:
    if scheme != "newest":
        return None
    from treadle_newest.source import NewestSource

    return NewestSource()
