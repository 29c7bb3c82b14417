"""``treadle plugin lock``: which plugins there are, written down, and the refusal when that changes.

A deployment that was tested with some plugins must not start with others because something was
installed, upgraded or disabled meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from treadle.errors import ConfigError, PluginConflictError
from treadle.plugins.entries import normal
from treadle.plugins.kinds import KINDS

if TYPE_CHECKING:
    from treadle.plugins.registry import Registry

__all__ = ("Lock", "Locked", "check", "locked", "read")

VERSION = 1


class Locked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key, and who served it in which version and generation of the hook."""

    id: str
    distribution: str
    version: str
    generation: int


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a lock file, which is JSON."""

    version: int
    plugins: list[Locked]


def locked(registry: Registry) -> Lock:
    """Every usable entry. The order is that of their names, so that files can be compared."""
    found = {
        Locked(e.id, normal(e.dist), e.version, KINDS[e.kind].generation)
        for e in registry.entries
        if e.usable
    }
    return Lock(VERSION, sorted(found, key=lambda p: (p.id, p.distribution)))


def read(path: Path) -> Lock:
    """Raises ``ConfigError`` for a file that is not a lock."""
    try:
        lock = msgspec.json.decode(path.read_bytes(), type=Lock)
    except OSError as error:
        raise ConfigError(
            f"--locked {path} cannot be read: {error.strerror}; write it with treadle plugin lock"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--locked {path} is not a lock file: {error}") from error
    if lock.version != VERSION:
        raise ConfigError(
            f"--locked {path} has version {lock.version}, this treadle reads {VERSION}"
        )
    return lock


def check(registry: Registry, path: Path) -> None:
    """Raise ``PluginConflictError`` with every difference if what is installed is not as locked."""
    drift = list(_drift(read(path), locked(registry)))
    if drift:
        raise PluginConflictError(
            f"plugins are not as {path} says:\n  "
            + "\n  ".join(drift)
            + f"\ninstall what it says, or write it anew with treadle plugin lock {path}"
        )


def _drift(wanted: Lock, found: Lock) -> Iterator[str]:
    was = {(p.id, p.distribution): p for p in wanted.plugins}
    now = {(p.id, p.distribution): p for p in found.plugins}
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name), now.get(name)
        if before is None and after is not None:
            yield f"+ {after.id} from {after.distribution} {after.version} is not in the file"
        elif after is None and before is not None:
            yield f"- {before.id} from {before.distribution} {before.version} is gone"
        elif before is not None and after is not None and before != after:
            if before.version != after.version:
                yield f"~ {name[0]}: {name[1]} {before.version} is locked, {after.version} is here"
            if before.generation != after.generation:
                kind = name[0].partition(":")[0]
                yield f"~ {name[0]}: {kind} v{before.generation} is locked, v{after.generation} is here"
