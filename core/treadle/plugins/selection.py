"""What was selected, as data: for child processes, and for lock files.

A child process does not select again: it imports the named plugins, and refuses those that differ
in its installation. A lock file names the plugins that a deployment was tested with: an engine must
not start with others because something was installed, upgraded or disabled in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from treadle.errors import ConfigError, PluginConflictError
from treadle.plugins.entries import Entry, normal, scan
from treadle.plugins.kinds import installed_kinds
from treadle.plugins.local import local_entries

__all__ = ("Lock", "PluginSelection", "check_lock", "lock_of")

VERSION = 1


class PluginSelection(msgspec.Struct, frozen=True, array_like=True):
    """Every selected plugin of one manager, not loaded yet. Travels as msgpack."""

    choices: list[Entry]

    def entries(self, installed: Callable[[], Iterable[Entry]] = scan) -> Iterator[Entry]:
        """Yield the selected entries; one whose plugin differs here is broken, with the reason."""
        files = {e.file for e in self.choices if e.file and Path(e.file).is_file()}
        found = chain(installed(), *map(local_entries, files))
        here = {(normal(e.dist), e.source): e.version for e in found}
        for choice in self.choices:
            entry, version = choice.unloaded(), here.get((normal(choice.dist), choice.source))
            if version != entry.version:
                has = version or "none"
                entry.close("broken", f"the parent has {entry.owner}, this worker has {has}")
            yield entry


class LockedPlugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """One key, and its owner with version and generation of the hook."""

    id: str
    distribution: str
    version: str
    generation: int

    def __str__(self) -> str:
        return f"{self.id} (v{self.generation}) from {self.distribution} {self.version}"


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a lock file, which is JSON."""

    version: int
    plugins: list[LockedPlugin]


def lock_of(entries: Iterable[Entry]) -> Lock:
    """Return every usable entry, sorted by name so that files can be compared."""
    kinds = installed_kinds()
    plugins = {
        LockedPlugin(e.id, normal(e.dist), e.version, kinds[e.kind].generation)
        for e in entries
        if e.usable
    }
    return Lock(VERSION, sorted(plugins))


def check_lock(entries: Iterable[Entry], name: str) -> None:
    """Raise ``PluginConflictError`` with every difference if the plugins are not as locked, and
    ``ConfigError`` for a file that is not a lock."""
    try:
        locked = msgspec.json.decode(Path(name).read_bytes(), type=Lock)
    except OSError as error:
        raise ConfigError(
            f"--plugin-lock-file {name} cannot be read: {error.strerror}; write it with treadle plugin lock"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--plugin-lock-file {name} is not a lock file: {error}") from error
    if locked.version != VERSION:
        raise ConfigError(
            f"--plugin-lock-file {name} has version {locked.version}, this treadle reads {VERSION}"
        )
    before, now = set(locked.plugins), set(lock_of(entries).plugins)
    if drift := sorted(before ^ now):
        lines = [f"{'-' if p in before else '+'} {p}" for p in drift]
        raise PluginConflictError(
            f"plugins are not as {name} says (- is locked, + is installed):\n  "
            + "\n  ".join(lines)
            + f"\ninstall what it says, or write it anew with treadle plugin lock {name}"
        )
