"""The pages of one KV cache group: reference counts, free list, prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ("NULL_PAGE", "PagePool")

# Page 0 is never allocated: page tables are padded with it, and padding tokens write to it.
NULL_PAGE = 0


class PagePool:
    """Reference-counted page ids ``1 … pages - 1``.

    A page is in use (reference count > 0), free, or evictable (reference count 0, but still in
    the prefix cache). Free pages are reused last in, first out. Evictable pages are reused only
    if no page is free, least recently used first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Number of free and evictable pages."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Number of pages in use."""
        return self.num_pages - 1 - self.num_available

    @property
    def num_cached(self) -> int:
        """Number of pages in the prefix cache, in use or evictable."""
        return len(self._page_of_hash)

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` pages with one reference each. Raises ``ValueError`` if too few."""
        if count > self.num_available:
            raise ValueError(f"{count} pages requested, {self.num_available} are available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                del self._page_of_hash[self._hash_of_page.pop(page)]
            self._refs[page] = 1
            pages.append(page)
        return pages

    def add_reference(self, pages: Iterable[int]) -> None:
        """Add a reference to pages in use or evictable. The null page is ignored."""
        for page in pages:
            if page == NULL_PAGE:
                continue
            if self._refs[page] == 0:
                del self._evictable[page]
            self._refs[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page. ``pages`` are in the order of the sequence.

        The last ones are evicted first, because more requests can share a shorter prefix.
        """
        for page in reversed(pages):
            if page == NULL_PAGE:
                continue
            if self._refs[page] <= 0:
                raise ValueError(f"page {page} is freed, but it is not in use")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._hash_of_page:
                    self._evictable[page] = None
                else:
                    self._free.append(page)

    def get_cached_page(self, digest: bytes) -> int | None:
        """Return the page with the hash ``digest``, or ``None`` if it is not cached."""
        return self._page_of_hash.get(digest)

    def cache_page(self, page: int, digest: bytes) -> None:
        """Add a page in use to the prefix cache, unless the hash or the page is in it already."""
        if digest not in self._page_of_hash and page not in self._hash_of_page:
            self._page_of_hash[digest] = page
            self._hash_of_page[page] = digest

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> list[str]:
        """Return the violated invariants, given all page tables. O(pages)."""
        counts = [0] * self.num_pages
        for table in holders:
            for page in table:
                counts[page] += 1
        counts[NULL_PAGE] = 0
        faults = [
            f"page {page} has {refs} references, but is in {counts[page]} tables"
            for page, refs in enumerate(self._refs)
            if refs != counts[page]
        ]
        idle = [*self._free, *self._evictable]
        if len(set(idle)) != len(idle):
            faults.append("a page is free or evictable twice")
        idle_set = set(idle)
        for page in range(1, self.num_pages):
            if (self._refs[page] == 0) != (page in idle_set):
                faults.append(f"page {page} must be either in use, or free or evictable")
        if any(self._page_of_hash.get(d) != p for p, d in self._hash_of_page.items()):
            faults.append("a page's hash refers to another page")
        if any(page not in self._hash_of_page for page in self._evictable):
            faults.append("an evictable page has no hash")
        return faults
