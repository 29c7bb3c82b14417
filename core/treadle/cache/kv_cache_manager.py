"""Page tables of sequences, for each KV cache group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from treadle.api.step_types import KVCacheGroup, PageTableUpdate
from treadle.cache.page_hash import PageHasher
from treadle.cache.page_pool import NULL_PAGE, PagePool

__all__ = ("HasPages", "KVCacheManager")


class HasPages(Protocol):
    """A sequence's page table for each KV cache group, and the hashes of its full pages."""

    slot: int
    page_tables: list[list[int]]
    page_hashes: list[bytes]
    root_hash: bytes
    num_cached_pages: int
    """Number of leading pages that ``cache_full_pages`` has added to the prefix cache."""


class KVCacheManager:
    """Page tables and a page pool for each KV cache group.

    Column ``i`` of a table holds tokens ``[i · page_size, (i + 1) · page_size)``. In a group with a sliding window,
    columns before the window of the next token hold the null page. All tables of a sequence have the same length.
    """

    def __init__(
        self, groups: Sequence[KVCacheGroup], page_size: int, *, prefix_caching: bool = True
    ) -> None:
        self.page_size = page_size
        self.windows = [group.window for group in groups]
        self._window_groups = [(i, w) for i, w in enumerate(self.windows) if w is not None]
        self.pools = [PagePool(group.num_pages) for group in groups]
        self.page_hasher = PageHasher(page_size)
        self.prefix_caching = prefix_caching

    @property
    def available(self) -> int:
        """Pages that can be allocated in every group."""
        return min(pool.num_available for pool in self.pools)

    def num_pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def num_missing_pages(self, holder: HasPages, tokens: int) -> int:
        """Return how many more pages per group ``holder`` needs for ``tokens`` tokens."""
        return max(0, self.num_pages_for(tokens) - len(holder.page_tables[0]))

    def max_tokens_for(self, holder: HasPages) -> int:
        """Return how many tokens ``holder`` could hold if it took every available page."""
        return (len(holder.page_tables[0]) + self.available) * self.page_size

    def can_allocate(self, holder: HasPages, tokens: int, chunk: int, reserve: int) -> bool:
        """Return whether ``tokens`` tokens fit and leave ``reserve`` pages available.

        A group with a sliding window frees pages between chunks of ``chunk`` tokens, so it needs fewer pages.
        """
        missing = self.num_missing_pages(holder, tokens)
        for pool, window in zip(self.pools, self.windows, strict=True):
            num_pages = (
                missing if window is None else min(missing, self.num_pages_for(window + chunk) + 1)
            )
            if num_pages + reserve > pool.num_available:
                return False
        return True

    def find_cached_prefix(self, holder: HasPages, tokens: Sequence[int]) -> int:
        """Return how many leading full pages of ``tokens`` are in the prefix cache.

        The page of the last token is excluded: computing that token gives the logits.
        """
        if not self.prefix_caching:
            return 0
        max_pages = (len(tokens) - 1) // self.page_size
        self.page_hasher.extend_hashes(holder.page_hashes, holder.root_hash, tokens, max_pages)
        hit = max_pages
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None:
                missing = (
                    i for i in range(hit) if pool.get_cached_page(holder.page_hashes[i]) is None
                )
                hit = next(missing, hit)
        return self._shorten_to_windows(holder.page_hashes, hit)

    def _shorten_to_windows(self, chain: Sequence[bytes], hit: int) -> int:
        """Return ``hit``, shortened until every page in the next token's windows is cached."""
        was_shortened = True
        while was_shortened:
            was_shortened = False
            for group, window in self._window_groups:
                # Shortening the hit also moves the window back, so a missing page stops mattering
                # only if the hit ends before that page.
                first = self._first_page_in_window(window, hit * self.page_size)
                cached_page = self.pools[group].get_cached_page
                missing = (i for i in range(first, hit) if cached_page(chain[i]) is None)
                new_hit = next(missing, hit)
                was_shortened |= new_hit < hit
                hit = new_hit
        return hit

    def share_prefix(self, holder: HasPages, pages: int) -> None:
        """Start the tables of ``holder`` with the ``pages`` pages of its cached prefix."""
        for pool, window, table in zip(self.pools, self.windows, holder.page_tables, strict=True):
            first = self._first_page_in_window(window, pages * self.page_size)
            for index in range(pages):
                page = pool.get_cached_page(holder.page_hashes[index]) if index >= first else None
                table.append(NULL_PAGE if page is None else page)
            pool.add_reference(table)
        holder.num_cached_pages = pages

    def share_tables(self, holder: HasPages, source: HasPages, pages: int) -> bool:
        """Start the tables of ``holder`` with the first ``pages`` pages of ``source``.

        Return ``False``, without sharing anything, if ``source`` has freed a page that is needed.
        """
        for window, source_table in zip(self.windows, source.page_tables, strict=True):
            first = self._first_page_in_window(window, pages * self.page_size)
            if len(source_table) < pages or NULL_PAGE in source_table[first:pages]:
                return False
        for pool, table, source_table in zip(
            self.pools, holder.page_tables, source.page_tables, strict=True
        ):
            table.extend(source_table[:pages])
            pool.add_reference(table)
        return True

    def allocate_pages(self, holder: HasPages, tokens: int) -> list[PageTableUpdate]:
        """Extend the tables to ``tokens`` tokens. Raises ``ValueError`` if pages are lacking."""
        count = self.num_missing_pages(holder, tokens)
        if not count:
            return []
        updates = []
        for group, (pool, table) in enumerate(zip(self.pools, holder.page_tables, strict=True)):
            pages = pool.allocate(count)
            updates.append(PageTableUpdate(group, holder.slot, len(table), pages))
            table.extend(pages)
        return updates

    def append_page(self, holders: Sequence[HasPages]) -> list[PageTableUpdate]:
        """Extend the tables of each holder by a page. Raises ``ValueError`` if pages are lacking."""
        writes = []
        for group, pool in enumerate(self.pools):
            for holder, page in zip(holders, pool.allocate(len(holders)), strict=True):
                table = holder.page_tables[group]
                writes.append(PageTableUpdate(group, holder.slot, len(table), [page]))
                table.append(page)
        return writes

    def page_table_updates(self, holder: HasPages) -> list[PageTableUpdate]:
        """Return updates with the complete tables of ``holder``, for its new slot."""
        return [
            PageTableUpdate(group, holder.slot, 0, list(table))
            for group, table in enumerate(holder.page_tables)
            if table
        ]

    def cache_full_pages(self, holder: HasPages, tokens: Sequence[int], computed: int) -> None:
        """Cache the pages that ``computed`` tokens fill; free those that have left the windows."""
        if self.prefix_caching:
            full = computed // self.page_size
            if full > holder.num_cached_pages:
                self.page_hasher.extend_hashes(holder.page_hashes, holder.root_hash, tokens, full)
                for pool, table in zip(self.pools, holder.page_tables, strict=True):
                    for index in range(holder.num_cached_pages, full):
                        if table[index] != NULL_PAGE:
                            pool.cache_page(table[index], holder.page_hashes[index])
                holder.num_cached_pages = full
        for group, window in self._window_groups:
            first = self._first_page_in_window(window, computed)
            self._free_out_of_window(self.pools[group], holder.page_tables[group], first)

    def _free_out_of_window(self, pool: PagePool, table: list[int], first: int) -> None:
        index = min(first, len(table)) - 1
        pages = []
        while index >= 0 and table[index] != NULL_PAGE:
            pages.append(table[index])
            table[index] = NULL_PAGE
            index -= 1
        if pages:
            pool.free(pages[::-1])

    def _first_page_in_window(self, window: int | None, position: int) -> int:
        """Return the first column that tokens from ``position`` on attend to."""
        if window is None:
            return 0
        return max(0, position - window + 1) // self.page_size

    def free(self, holder: HasPages) -> None:
        """Free all pages of ``holder``."""
        for pool, table in zip(self.pools, holder.page_tables, strict=True):
            pool.free(table)
            table.clear()
        holder.num_cached_pages = 0

    def check_integrity(self, holders: Iterable[HasPages]) -> list[str]:
        """Return the violated invariants, given all sequences that have pages."""
        holder_list = list(holders)
        faults: list[str] = []
        for group, pool in enumerate(self.pools):
            pool_faults = pool.check_integrity(h.page_tables[group] for h in holder_list)
            faults.extend(f"group {group}: {fault}" for fault in pool_faults)
        return faults
