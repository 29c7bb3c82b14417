"""What the layers ask of the paged KV cache, and what devices there are."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

__all__ = ("CacheKind", "CacheLayout", "ConnectorRole", "DeviceInfo", "LayerCacheSpec")

CacheKind = Literal["full", "sliding", "latent", "state"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as plugins see it. ``memory`` is its total in bytes."""

    kind: str
    capability: tuple[int, int] | None = None
    memory: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """What one layer keeps for each token: ``kv_heads × head_size`` keys and as many values."""

    layer: str
    kv_heads: int
    head_size: int
    dtype: str
    window: int | None = None
    kind: CacheKind = "full"


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The pages of one engine as a KV connector sees them."""

    page_size: int
    pages: int
    layers: tuple[LayerCacheSpec, ...]


class ConnectorRole(enum.Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"
