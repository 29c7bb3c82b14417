"""The paged KV cache: page pool, prefix digests, page tables."""

from weft.cache.digests import Digests
from weft.cache.pool import NULL_PAGE, PagePool
from weft.cache.tables import KVCache, PageHolder

__all__ = ("NULL_PAGE", "Digests", "KVCache", "PageHolder", "PagePool")
