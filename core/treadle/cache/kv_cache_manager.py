"""Page tables of sequences, for each KV cache group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from treadle.api.step_types import CacheGroup, PageWrite
from treadle.cache.page_hash import Digests
from treadle.cache.page_pool import NULL_PAGE, PagePool

__all__ = ("KVCache", "PageHolder")


class PageHolder(Protocol):
    """A sequence's page table for each KV cache group, and the hashes of its full pages."""

    slot: int
    tables: list[list[int]]
    chain: list[bytes]
    root: bytes
    named: int
    """Number of leading pages that ``cache_full_pages`` has added to the prefix cache."""


class KVCache:
    """Page tables and a page pool for each KV cache group.

    Column ``i`` of a table holds tokens ``[i · page_size, (i + 1) · page_size)``. In a group with
    a sliding window, columns before the window of the next token hold the null page. All tables
    of a sequence have the same length.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        *,
        prefix_caching: bool = True,
        secret: bytes | None = None,
    ) -> None:
        self.page_size = page_size
        self.windows = [group.window for group in groups]
        self.pools = [PagePool(group.pages) for group in groups]
        self.digests = Digests(page_size, secret)
        self.prefix_caching = prefix_caching

    # ---------------------------------------------------------------------------- sizes

    @property
    def available(self) -> int:
        """Pages that can be allocated in every group."""
        return min(pool.available for pool in self.pools)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits if it is the only one."""
        return self.page_size * min(
            pool.capacity if window is None or pool.capacity < self.pages_for(window) + 2 else 2**31
            for pool, window in zip(self.pools, self.windows, strict=True)
        )

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def missing(self, holder: PageHolder, tokens: int) -> int:
        """Return how many more pages per group ``holder`` needs for ``tokens`` tokens."""
        return max(0, self.pages_for(tokens) - len(holder.tables[0]))

    def room(self, holder: PageHolder) -> int:
        """Return how many tokens ``holder`` could hold if it took every available page."""
        return (len(holder.tables[0]) + self.available) * self.page_size

    def fits(self, holder: PageHolder, tokens: int, chunk: int, reserve: int) -> bool:
        """Return whether ``tokens`` tokens fit and leave ``reserve`` pages available.

        A group with a sliding window frees pages between chunks of ``chunk`` tokens, so it needs
        fewer pages.
        """
        missing = self.missing(holder, tokens)
        for pool, window in zip(self.pools, self.windows, strict=True):
            need = missing if window is None else min(missing, self.pages_for(window + chunk) + 1)
            if need + reserve > pool.available:
                return False
        return True

    # -------------------------------------------------------------------- prefix sharing

    def match(self, holder: PageHolder, tokens: Sequence[int]) -> int:
        """Return how many leading full pages of ``tokens`` are in the prefix cache.

        The page of the last token is excluded: computing that token gives the logits.
        """
        if not self.prefix_caching:
            return 0
        most = (len(tokens) - 1) // self.page_size
        self.digests.extend(holder.chain, holder.root, tokens, most)
        hit = most
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None:
                missing = (i for i in range(hit) if pool.find(holder.chain[i]) is None)
                hit = next(missing, hit)
        return self._seen_in_windows(holder.chain, hit)

    def _seen_in_windows(self, chain: Sequence[bytes], hit: int) -> int:
        """Return ``hit``, shortened until every page in the next token's windows is cached."""
        shortened = True
        while shortened:
            shortened = False
            for pool, window in zip(self.pools, self.windows, strict=True):
                if window is None:
                    continue
                # Shortening the hit also moves the window back, so a missing page stops mattering
                # only if the hit ends before that page.
                first = self._first_needed(window, hit * self.page_size)
                missing = (i for i in range(first, hit) if pool.find(chain[i]) is None)
                shorter = next(missing, hit)
                shortened |= shorter < hit
                hit = shorter
        return hit

    def share_prefix(self, holder: PageHolder, pages: int) -> None:
        """Start the tables of ``holder`` with the ``pages`` pages of its cached prefix."""
        for pool, window, table in zip(self.pools, self.windows, holder.tables, strict=True):
            first = self._first_needed(window, pages * self.page_size)
            for index in range(pages):
                page = pool.find(holder.chain[index]) if index >= first else None
                table.append(NULL_PAGE if page is None else page)
            pool.share(table)
        holder.named = pages

    def share_tables(self, holder: PageHolder, other: PageHolder, pages: int) -> bool:
        """Start the tables of ``holder`` with the first ``pages`` pages of ``other``.

        Return ``False``, without sharing anything, if ``other`` has freed a page that is needed.
        """
        for window, theirs in zip(self.windows, other.tables, strict=True):
            first = self._first_needed(window, pages * self.page_size)
            if len(theirs) < pages or NULL_PAGE in theirs[first:pages]:
                return False
        for pool, mine, theirs in zip(self.pools, holder.tables, other.tables, strict=True):
            mine.extend(theirs[:pages])
            pool.share(mine)
        return True

    # ----------------------------------------------------------------- growing, shrinking

    def grow(self, holder: PageHolder, tokens: int) -> list[PageWrite]:
        """Extend the tables to ``tokens`` tokens. Raises ``ValueError`` if pages are lacking."""
        count = self.missing(holder, tokens)
        if not count:
            return []
        writes = []
        for group, (pool, table) in enumerate(zip(self.pools, holder.tables, strict=True)):
            pages = pool.take(count)
            writes.append(PageWrite(group, holder.slot, len(table), pages))
            table.extend(pages)
        return writes

    def written(self, holder: PageHolder) -> list[PageWrite]:
        """Return updates with the complete tables of ``holder``, for its new slot."""
        return [
            PageWrite(group, holder.slot, 0, list(table))
            for group, table in enumerate(holder.tables)
            if table
        ]

    def keep(self, holder: PageHolder, tokens: Sequence[int], computed: int) -> None:
        """Cache the pages that ``computed`` tokens fill; free those that have left the windows."""
        if self.prefix_caching:
            full = computed // self.page_size
            if full > holder.named:
                self.digests.extend(holder.chain, holder.root, tokens, full)
                for pool, table in zip(self.pools, holder.tables, strict=True):
                    for index in range(holder.named, full):
                        if table[index] != NULL_PAGE:
                            pool.name(table[index], holder.chain[index])
                holder.named = full
        for pool, window, table in zip(self.pools, self.windows, holder.tables, strict=True):
            if window is not None:
                self._let_go(pool, table, self._first_needed(window, computed))

    def _let_go(self, pool: PagePool, table: list[int], first: int) -> None:
        index = min(first, len(table)) - 1
        gone = []
        while index >= 0 and table[index] != NULL_PAGE:
            gone.append(table[index])
            table[index] = NULL_PAGE
            index -= 1
        if gone:
            pool.release(gone[::-1])

    def _first_needed(self, window: int | None, position: int) -> int:
        """Return the first column that tokens from ``position`` on attend to."""
        if window is None:
            return 0
        return max(0, position - window + 1) // self.page_size

    def release(self, holder: PageHolder) -> None:
        """Free all pages of ``holder``."""
        for pool, table in zip(self.pools, holder.tables, strict=True):
            pool.release(table)
            table.clear()
        holder.named = 0

    # --------------------------------------------------------------------------- checking

    def faults(self, holders: Iterable[PageHolder]) -> list[str]:
        """Return the violated invariants, given all sequences that have pages."""
        everyone = list(holders)
        faults: list[str] = []
        for group, pool in enumerate(self.pools):
            found = pool.faults(h.tables[group] for h in everyone)
            faults.extend(f"group {group}: {fault}" for fault in found)
        return faults
