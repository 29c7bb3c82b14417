"""What the parent process chose, as data that a worker can be given.

A worker does not choose again: it imports what the plan names. It looks at its own metadata only
to refuse when its installation differs from the parent's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from treadle.plugins.entries import Entry, normal, scan
from treadle.plugins.local import local_entries

__all__ = ("Choice", "Plan")


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One key and the plugin that serves it."""

    kind: str
    key: str
    target: str
    dist: str
    version: str
    file: str | None = None

    @classmethod
    def of(cls, entry: Entry, kind: str, key: str) -> Choice:
        """The choice of ``entry`` for a key, which may be served by the fallback."""
        file = str(entry.file) if entry.file else None
        return cls(kind, key, entry.target, entry.dist, entry.version, file)

    def entry(self) -> Entry:
        file = Path(self.file) if self.file else None
        return Entry(self.kind, self.key, self.target, self.dist, self.version, file=file)


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """Every choice of one host. Travels as msgpack."""

    choices: list[Choice]

    def entries(self, installed: Callable[[], Iterable[Entry]] = scan) -> Iterator[Entry]:
        """The planned entries; one whose plugin differs here is broken, and says how."""
        here = {(normal(e.dist), e.target): e.version for e in installed()}
        for choice in self.choices:
            entry = choice.entry()
            ours = (
                _file_version(choice.file)
                if choice.file
                else here.get((normal(choice.dist), choice.target))
            )
            if ours is None:
                entry.close(
                    "broken", f"the parent has {choice.dist} {choice.version}, this worker has none"
                )
            elif ours != choice.version:
                entry.close(
                    "broken",
                    f"the parent has {choice.dist} {choice.version}, this worker has {ours}",
                )
            yield entry


def _file_version(file: str) -> str | None:
    if not Path(file).is_file():
        return None
    return next((entry.version for entry in local_entries(file)), None)
