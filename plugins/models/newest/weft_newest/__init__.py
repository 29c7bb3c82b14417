"""The model source ``newest``: the newest complete checkpoint in a folder of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.types import ModelSource

__all__ = ("weft_model_source",)


@impl
def weft_model_source(scheme: str) -> ModelSource | None:
    if scheme != "newest":
        return None
    from weft_newest.source import NewestSource

    return NewestSource()
