"""The paged KV cache: page pool, page hashes, page tables."""

from treadle.cache.kv_cache_manager import KVCache, PageHolder
from treadle.cache.page_hash import Digests
from treadle.cache.page_pool import NULL_PAGE, PagePool

__all__ = ("NULL_PAGE", "Digests", "KVCache", "PageHolder", "PagePool")
