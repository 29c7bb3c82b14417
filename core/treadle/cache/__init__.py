"""The paged KV cache: page pool, page hashes, page tables."""

from treadle.cache.kv_cache_manager import HasPages, KVCacheManager
from treadle.cache.page_hash import PageHasher
from treadle.cache.page_pool import NULL_PAGE, PagePool

__all__ = ("NULL_PAGE", "HasPages", "KVCacheManager", "PageHasher", "PagePool")
