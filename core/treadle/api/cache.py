"""Descriptions of devices and of the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ("CacheKind", "DeviceInfo", "KVCacheSpec")

CacheKind = Literal["full", "sliding", "latent", "state"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device, for plugins. ``memory`` is its total memory in bytes."""

    type: str
    capability: tuple[int, int] | None = None
    memory: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """A layer's KV cache per token: ``kv_heads × head_size`` keys and as many values."""

    layer: str
    num_kv_heads: int
    head_size: int
    dtype: str
    window: int | None = None
    kind: CacheKind = "full"
