"""Lock files: the plugins that a deployment was tested with, and the check at the start.

A deployment must not start with other plugins because something was installed, upgraded or disabled
in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from treadle.errors import ConfigError, PluginConflictError
from treadle.plugins.entries import Entry, normal
from treadle.plugins.kinds import installed_kinds

__all__ = ("Lock", "LockedPlugin", "check_lock", "lock_of")

VERSION = 1


class LockedPlugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key, and its owner with version and generation of the hook."""

    id: str
    distribution: str
    version: str
    generation: int


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
    return Lock(VERSION, sorted(plugins, key=lambda p: (p.id, p.distribution)))


def check_lock(entries: Iterable[Entry], path: Path) -> None:
    """Raise ``PluginConflictError`` with every difference if the plugins are not as locked, and
    ``ConfigError`` for a file that is not a lock."""
    try:
        locked = msgspec.json.decode(path.read_bytes(), type=Lock)
    except OSError as error:
        raise ConfigError(
            f"--plugin-lock-file {path} cannot be read: {error.strerror}; write it with treadle plugin lock"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--plugin-lock-file {path} is not a lock file: {error}") from error
    if locked.version != VERSION:
        raise ConfigError(
            f"--plugin-lock-file {path} has version {locked.version}, this treadle reads {VERSION}"
        )
    if drift := list(_drift(locked, lock_of(entries))):
        raise PluginConflictError(
            f"plugins are not as {path} says:\n  "
            + "\n  ".join(drift)
            + f"\ninstall what it says, or write it anew with treadle plugin lock {path}"
        )


def _drift(locked: Lock, installed: Lock) -> Iterator[str]:
    old = {(p.id, p.distribution): p for p in locked.plugins}
    new = {(p.id, p.distribution): p for p in installed.plugins}
    for id, dist in sorted(old.keys() | new.keys()):
        before, after = old.get((id, dist)), new.get((id, dist))
        if before is None and after is not None:
            yield f"+ {id} from {dist} {after.version} is not in the file"
        elif before is not None and after is None:
            yield f"- {id} from {dist} {before.version} is gone"
        elif before is not None and after is not None and before != after:
            if before.version != after.version:
                yield f"~ {id}: {dist} {before.version} is locked, {after.version} is here"
            if before.generation != after.generation:
                kind = id.partition(":")[0]
                yield f"~ {id}: {kind} v{before.generation} is locked, v{after.generation} is here"
