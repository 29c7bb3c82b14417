"""Writing new keys and values into a paged cache with torch's operations."""

from __future__ import annotations

from treadle.attention.storage import write_kv as write_kv

__all__ = ("write_kv",)
