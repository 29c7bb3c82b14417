"""Lock files: the plugins that a deployment was tested with, as JSON.

An engine must not start with others because something was installed, upgraded or disabled in the
meantime. ``treadle plugin lock`` writes the file, and every plugin manager with the option
``plugin_lock_file`` compares itself with it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from treadle.errors import ConfigError, PluginConflictError
from treadle.regular_files import read_regular

__all__ = ("VERSION", "Lock", "LockedPlugin", "check_lock")

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
    """The content of a lock file, which is JSON; ``code`` has a hash of each distribution's files."""

    version: int
    plugins: list[LockedPlugin]
    code: dict[str, str] = {}


def check_lock(present: Lock, name: str) -> None:
    """Compare the plugins of this process with a lock file.

    Raises ``PluginConflictError`` with every difference, ``ConfigError`` for a file that is not a lock.
    """
    try:
        locked = msgspec.json.decode(read_regular(Path(name)), type=Lock)
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
    locked_plugins, installed_plugins = set(locked.plugins), set(present.plugins)
    if drift := sorted(locked_plugins ^ installed_plugins):
        lines = [f"{'-' if p in locked_plugins else '+'} {p}" for p in drift]
        raise PluginConflictError(
            f"plugins are not as {name} says (- is locked, + is installed):\n  "
            + "\n  ".join(lines)
            + f"\ninstall what it says, or write it anew with treadle plugin lock {name}"
        )
