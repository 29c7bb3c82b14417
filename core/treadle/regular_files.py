"""Opening files that somebody else wrote: regular files only, of a limited size.

A named pipe would be waited for without end, a device may be endless, and a file of the wrong kind
may fill the memory before anything looks at its content.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ("check_regular", "import_file", "read_regular")

TYPE_NAMES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: Path | int, max_bytes: int | None = None) -> None:
    """Raise ``OSError`` unless ``path``, or an open descriptor, is a regular file that fits."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        name = TYPE_NAMES.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {name}, not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise OSError(
            errno.EFBIG, f"it has {status.st_size} bytes; such a file may have {max_bytes}"
        )


def read_regular(path: Path, max_bytes: int = 2**20) -> bytes:
    """Return the content of a file without ever waiting for it. Raises ``OSError``."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as stream:
        check_regular(file, max_bytes)
        return stream.read(max_bytes)


class _SourceLoader(SourceFileLoader):
    """Compiles a regular file. Kept bytecode may be that of an older one with the same size and time."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(read_regular(Path(self.path)), self.path)


def import_file(name: str, file: str) -> ModuleType:
    """Run a Python file once, as the module ``name``, and return the module."""
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # Structs and dataclasses look their module up while it runs
    try:
        _SourceLoader(name, file).exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
