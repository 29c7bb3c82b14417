"""The paged KV cache: page pool, prefix digests, page tables."""

from treadle.cache.digests import Digests
from treadle.cache.pool import NULL_PAGE, PagePool
from treadle.cache.tables import KVCache, PageHolder

__all__ = ("NULL_PAGE", "Digests", "KVCache", "PageHolder", "PagePool")
