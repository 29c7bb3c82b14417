"""The folder of files and batches: its layout, its lock, and small files that are replaced whole."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from treadle.errors import ConfigError
from treadle_server.config import ServerConfig

__all__ = ("Folder", "check_files_dir", "write_whole")

PARTS = ("files", "batches", "uploads")


class Folder:
    """A folder that this process alone uses until ``close``. Raises ``ConfigError``."""

    def __init__(self, path: Path) -> None:
        try:
            for part in PARTS:
                (path / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"option files_dir is {str(path)!r}, which cannot be used: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"option files_dir is {str(path)!r}, which another server uses; give each its own"
            ) from error
        self.files, self.batches, self.uploads = (path / part for part in PARTS)

    def close(self) -> None:
        os.close(self._lock)


def check_files_dir(config: ServerConfig) -> None:
    """Raise ``ConfigError`` if the folder of files cannot be used. Called before the model is loaded."""
    if config.files_dir is not None:
        Folder(Path(config.files_dir)).close()


def write_whole(path: Path, value: object) -> None:
    """Replace a file by ``value`` as JSON; a crash leaves the old one or the new one.

    Raises ``OSError``.
    """
    draft = path.with_suffix(".new")
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
