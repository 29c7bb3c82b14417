"""What the parent process selected, as data for worker processes.

A worker does not select again: it imports the named plugins. It reads its own metadata only to
refuse an installation that differs from the parent's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from treadle.plugins.entries import Entry, normal, scan
from treadle.plugins.local import local_entries

__all__ = ("PluginSelection", "SelectedPlugin")


class SelectedPlugin(msgspec.Struct, frozen=True, array_like=True):
    """One key and the plugin that serves it."""

    kind: str
    key: str
    target: str
    dist: str
    version: str
    file: str | None = None

    @classmethod
    def of(cls, entry: Entry, kind: str, key: str) -> SelectedPlugin:
        """Return the selection of ``entry`` for a key, which may be served by the fallback."""
        file = str(entry.file) if entry.file else None
        return cls(kind, key, entry.target, entry.dist, entry.version, file)

    def entry(self) -> Entry:
        file = Path(self.file) if self.file else None
        return Entry(self.kind, self.key, self.target, self.dist, self.version, file=file)


class PluginSelection(msgspec.Struct, frozen=True, array_like=True):
    """Every selected plugin of one manager. Travels as msgpack."""

    choices: list[SelectedPlugin]

    def entries(self, installed: Callable[[], Iterable[Entry]] = scan) -> Iterator[Entry]:
        """Yield the selected entries; one whose plugin differs here is broken, with the reason."""
        here = {(normal(e.dist), e.target): e.version for e in installed()}
        for choice in self.choices:
            entry = choice.entry()
            if choice.file:
                found = _file_version(choice.file)
            else:
                found = here.get((normal(choice.dist), choice.target))
            if found != choice.version:
                has = found or "none"
                entry.close(
                    "broken",
                    f"the parent has {choice.dist} {choice.version}, this worker has {has}",
                )
            yield entry


def _file_version(file: str) -> str | None:
    if not Path(file).is_file():
        return None
    return next((entry.version for entry in local_entries(file)), None)
