"""The responses that are kept for ``previous_response_id``, with bounds.

All of them together take at most so many bytes and entries. When there are more, the one that was
not used for longest goes, of the key that takes the most: nobody can push out what others keep.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

__all__ = ("ResponseStore", "StoredResponse")

ENTRY_BYTES = 1024
"""What an entry takes beside its texts."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as JSON, and as JSON the items that it answers, those of earlier responses included."""

    id: str
    response: bytes
    items: bytes
    item_ids: frozenset[str] = frozenset()
    """The ids of its output items, which later requests may refer to."""

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.response) + len(self.items)


class _Shelf:
    """What one key keeps."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.item_owners: dict[str, str] = {}
        self.num_bytes = 0

    def add(self, entry: StoredResponse) -> None:
        self.remove(entry.id)
        self.entries[entry.id] = entry
        self.num_bytes += entry.size
        self.item_owners.update(dict.fromkeys(entry.item_ids, entry.id))

    def remove(self, id: str) -> StoredResponse | None:
        entry = self.entries.pop(id, None)
        if entry is not None:
            self.num_bytes -= entry.size
            for item_id in entry.item_ids:
                self.item_owners.pop(item_id, None)
        return entry


class ResponseStore:
    """Keeps responses by key of the API and id."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def put(self, owner: str, entry: StoredResponse) -> bool:
        """Keep a response and return ``True``, unless it alone is more than may be kept."""
        if self._max_entries == 0 or entry.size > self._max_bytes:
            return False
        self._shelves.setdefault(owner, _Shelf()).add(entry)
        while self.num_bytes > self._max_bytes:
            self._evict(max(self._shelves, key=lambda o: self._shelves[o].num_bytes))
        while len(self) > self._max_entries:
            self._evict(max(self._shelves, key=lambda o: len(self._shelves[o].entries)))
        return True

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """Return a response of ``owner`` and count it as used."""
        shelf = self._shelves.get(owner)
        if shelf is None or id not in shelf.entries:
            return None
        shelf.entries.move_to_end(id)
        return shelf.entries[id]

    def with_item(self, owner: str, item_id: str) -> StoredResponse | None:
        """Return the response of ``owner`` that made an item."""
        shelf = self._shelves.get(owner)
        return None if shelf is None else self.get(owner, shelf.item_owners.get(item_id, ""))

    def delete(self, owner: str, id: str) -> bool:
        """Forget a response; returns whether there was one."""
        shelf = self._shelves.get(owner)
        if shelf is None or shelf.remove(id) is None:
            return False
        if not shelf.entries:
            del self._shelves[owner]
        return True

    def _evict(self, owner: str) -> None:
        self.delete(owner, next(iter(self._shelves[owner].entries)))
