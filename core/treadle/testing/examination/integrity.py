"""Whether installed code is what it was: hashes of the files that an installer has listed.

A version says what was published. Who edits an installed file, or builds one version twice, changes code
and no version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import msgspec

from treadle.errors import ConfigError, PluginConflictError
from treadle.plugin_lock import Lock
from treadle.plugins import PluginManager
from treadle.plugins.entries import normal
from treadle.regular_files import read_regular
from treadle.testing.examination.findings import editable_folder

__all__ = ("EDITABLE", "UNLISTED", "check_code", "code_of", "codes", "lock_with_code")

EDITABLE = "editable"
UNLISTED = "unlisted"
MAX_FILE_BYTES = 2**32


def code_of(distribution: str) -> str:
    """Return a hash of the installed files of a distribution, the same on every machine.

    ``EDITABLE`` if it imports a working tree, ``UNLISTED`` if there is no list of its files. A file
    outside of the folder that it is installed in, and one that is not a regular file, is never read.
    """
    if editable_folder(distribution) is not None:
        return EDITABLE
    try:
        files = metadata.distribution(distribution).files
    except (metadata.PackageNotFoundError, ValueError, TypeError):
        return UNLISTED
    if not files:
        return UNLISTED
    code = sha256()
    for name, path in sorted((os.path.normpath(file), Path(str(file.locate()))) for file in files):
        folder = name.partition(os.sep)[0]
        # Scripts name the interpreter, caches the time, and each installer has files of its own.
        if folder in ("", "..") or name.endswith(".pyc") or folder.endswith(".dist-info"):
            continue
        try:
            content = sha256(read_regular(path, MAX_FILE_BYTES)).hexdigest()
        except (OSError, ValueError):
            content = "missing"
        code.update(f"{name} {content}\n".encode(errors="backslashreplace"))
    return code.hexdigest()[:16]


def codes(plugins: PluginManager) -> dict[str, str]:
    """Return ``code_of`` every installed distribution with a usable plugin, by normalized name."""
    names = {normal(e.dist) for e in plugins.entries if e.usable and e.file is None}
    return {name: code_of(name) for name in sorted(names)}


def lock_with_code(plugins: PluginManager, *, allow_editable: bool = False) -> Lock:
    """Return the lock of ``plugins``. Raises ``ConfigError`` for editable ones that are not allowed."""
    code = codes(plugins)
    editable = [name for name, value in code.items() if value == EDITABLE]
    if editable and not allow_editable:
        raise ConfigError(
            f"{', '.join(editable)}: the code of an editable installation changes without a version; "
            "install it, or lock it as editable with --allow-editable"
        )
    return msgspec.structs.replace(plugins.lock(), code=code)


def check_code(plugins: PluginManager) -> None:
    """Compare the installed code with the lock file of the options, if there is one.

    The plugin manager has compared the versions. Raises ``PluginConflictError`` with every difference.
    """
    if (name := plugins.config.plugin_lock_file) is None:
        return
    present = codes(plugins)
    locked = msgspec.json.decode(read_regular(Path(name)), type=Lock).code
    if locked and (lines := list(_differences(locked, present))):
        raise PluginConflictError(
            f"the code of plugins is not what {name} says:\n  "
            + "\n  ".join(lines)
            + f"\ninstall it again, or write the lock anew with treadle plugin lock {name}"
        )


def _differences(locked: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {locked.get(name, 'nothing')} is locked, {present.get(name, 'nothing')} is installed"
        for name in sorted(locked.keys() | present.keys())
        if locked.get(name) != present.get(name)
    ]
