"""Lock files: the plugins that a deployment was tested with, and the check at the start.

A deployment must not start with other plugins because something was installed, upgraded or disabled
in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from treadle.errors import ConfigError, PluginConflictError
from treadle.plugins.entries import Entry, normal
from treadle.plugins.kinds import installed_kinds

__all__ = ("Lock", "LockedPlugin", "check_lock", "lock_of")

VERSION = 1


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
    before, now = set(locked.plugins), set(lock_of(entries).plugins)
    if drift := sorted(before ^ now):
        lines = [f"{'-' if p in before else '+'} {p}" for p in drift]
        raise PluginConflictError(
            f"plugins are not as {path} says (- is locked, + is installed):\n  "
            + "\n  ".join(lines)
            + f"\ninstall what it says, or write it anew with treadle plugin lock {path}"
        )
