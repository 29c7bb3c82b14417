"""``GET /v1/models``."""

from __future__ import annotations

import msgspec

__all__ = ("ModelCard", "ModelList")


class ModelCard(msgspec.Struct, kw_only=True):
    """``root`` is what the operator typed; ``id`` is a name that requests may use."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "treadle"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
