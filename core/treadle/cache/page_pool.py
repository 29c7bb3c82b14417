"""The pages of one cache group: who holds each, which are free, which may be taken back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ("NULL_PAGE", "PagePool")

# Page 0 is never handed out: page tables are padded with it, and padding tokens write to it.
NULL_PAGE = 0


class PagePool:
    """Reference-counted page ids ``1 … pages - 1``.

    A page is in exactly one of three states: held (reference count > 0), free, or evictable: held
    by nobody, but its content is still named by a digest, so that a later request may share it.
    Free pages are reused last in, first out; evictable ones least recently used first, and only
    when no free page is left.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._refs = [0] * pages
        self._free = list(range(pages - 1, NULL_PAGE, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_digest: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that ``take`` could return now."""
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.pages - 1 - self.available

    @property
    def capacity(self) -> int:
        return self.pages - 1

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` pages with one reference each. The caller has checked ``available``."""
        if count > self.available:
            raise ValueError(f"{count} pages were asked for, {self.available} are available")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are held or evictable (the null page is ignored)."""
        for page in pages:
            if page == NULL_PAGE:
                continue
            if self._refs[page] == 0:
                del self._evictable[page]
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page. Pages are given front to back; the back of a sequence
        is evicted first, because a prefix is worth more than what follows it."""
        for page in reversed(pages):
            if page == NULL_PAGE:
                continue
            if self._refs[page] <= 0:
                raise ValueError(f"page {page} is released, but nobody holds it")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._digest:
                    self._evictable[page] = None
                else:
                    self._free.append(page)

    def find(self, digest: bytes) -> int | None:
        """The page whose content ``digest`` names."""
        return self._by_digest.get(digest)

    def name(self, page: int, digest: bytes) -> None:
        """Give a held page's content a name; the first page with a name keeps it."""
        if digest not in self._by_digest and page not in self._digest:
            self._by_digest[digest] = page
            self._digest[page] = digest

    def reset(self) -> None:
        """Forget all names: evictable pages become free."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._by_digest.clear()
        self._digest.clear()

    def _forget(self, page: int) -> None:
        del self._by_digest[self._digest.pop(page)]

    def faults(self, holders: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong, given every table that holds pages: O(pages), an empty list if nothing."""
        held = [0] * self.pages
        for table in holders:
            for page in table:
                held[page] += 1
        held[NULL_PAGE] = 0
        faults = [
            f"page {page} has {refs} references, {held[page]} tables hold it"
            for page, refs in enumerate(self._refs)
            if refs != held[page]
        ]
        idle = [*self._free, *self._evictable]
        if len(set(idle)) != len(idle):
            faults.append("a page is free or evictable twice")
        idle_set = set(idle)
        for page in range(1, self.pages):
            if (self._refs[page] == 0) != (page in idle_set):
                faults.append(f"page {page} is neither held nor idle, or both")
        if any(self._by_digest.get(d) != p for p, d in self._digest.items()):
            faults.append("a page's digest leads to another page")
        if any(page not in self._digest for page in self._evictable):
            faults.append("an evictable page has no digest")
        return faults
