"""Appends statistics to a file, not more often than asked."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.api.types import EngineStats

__all__ = ("JsonLines",)


class JsonLines:
    """See ``treadle.api.engine.StatLogger``.

    The file is opened for each line, so that it may be moved away while the engine runs.
    """

    def __init__(self, path: str, seconds: float) -> None:
        """Raises ``ConfigError`` if the file cannot be written."""
        self._path = Path(path)
        self._seconds = seconds
        self._next = time.monotonic()
        try:
            self._append("")
        except OSError as error:
            raise ConfigError(
                f"stat logger jsonl cannot write to {path!r}: {error.strerror}; set "
                "--plugin.stat_loggers.jsonl.path"
            ) from error

    def record(self, stats: EngineStats) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._seconds
        line = {"time": time.time(), **msgspec.structs.asdict(stats)}
        self._append(msgspec.json.encode(line).decode() + "\n")

    def _append(self, text: str) -> None:
        with open(self._path, "a", encoding="utf-8", opener=_open) as file:
            file.write(text)


def _open(path: str, flags: int) -> int:
    """Open without waiting: a named pipe that nobody reads is an error."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
