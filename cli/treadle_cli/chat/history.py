"""What was typed in earlier chats: a file of this user, bounded, one JSON text a line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from prompt_toolkit.history import History

from treadle.regular_files import read_regular

__all__ = ("FileHistory", "history_path")

MAX_ENTRIES = 1000
MAX_ENTRY_BYTES = 64 * 2**10
MAX_FILE_BYTES = 16 * 2**20


def history_path() -> Path:
    """The file of this user, in the folder where the system keeps the state of programs."""
    from platformdirs import user_state_path

    return user_state_path("treadle", appauthor=False) / "chat_history.jsonl"


class FileHistory(History):
    """The last ``MAX_ENTRIES`` entries. A file that cannot be used costs the history, not the chat.

    Several chats may append at once. An entry that begins with a space is not kept, as in a shell.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, newest first, and cut the file if it has grown far beyond its bound."""
        try:
            lines = read_regular(self._path, MAX_FILE_BYTES).splitlines()
        except OSError:
            return []
        if len(lines) > 2 * MAX_ENTRIES:
            lines = lines[-MAX_ENTRIES:]
            self._rewrite(lines)
        return list(decoded(reversed(lines[-MAX_ENTRIES:])))

    def store_string(self, string: str) -> None:
        line = msgspec.json.encode(string) + b"\n"
        if string.startswith(" ") or len(line) > MAX_ENTRY_BYTES:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._path, flags, 0o600)
            try:
                os.write(file, line)  # at once: another chat may append, too
            finally:
                os.close(file)

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as stream:
                stream.writelines(line + b"\n" for line in lines)
            os.replace(draft, self._path)


def decoded(lines: Iterable[bytes]) -> Iterable[str]:
    """The texts of lines; those that another program wrote are left out."""
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=str)
