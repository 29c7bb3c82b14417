"""The memory of the processes of a server, which only the system knows."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ("ProcessMemory", "child_memory", "resident_bytes")

ROLES = {
    "treadle.engine.process": "engine",
    "treadle.structured_output.checker": "grammars",
    "treadle_jinja.isolation": "templates",
    "treadle_server.isolation.child": "isolated",
    "treadle_server.isolation.route_child": "isolated",
}
"""By the module that a child begins with; others are ``other``, whatever a plugin starts."""


class ProcessMemory(NamedTuple):
    """A process, what it does, and its resident bytes."""

    pid: int
    role: str
    bytes: int


def resident_bytes(pid: int | None = None) -> dict[str, int]:
    """Return the resident bytes of this process, ``api``, and of all below it, summed by role.

    Empty where there is no ``/proc``.
    """
    sizes: Counter[str] = Counter()
    for process in _processes(os.getpid() if pid is None else pid):
        sizes[process.role] += process.bytes
    return dict(sorted(sizes.items()))


def child_memory() -> dict[int, ProcessMemory]:
    """Return the processes below this one, by their ids."""
    return {p.pid: p for p in _processes(os.getpid()) if p.pid != os.getpid()}


def _processes(root: int) -> Iterator[ProcessMemory]:
    pending = [root]
    while pending:
        process = pending.pop()
        with contextlib.suppress(OSError):  # it has ended meanwhile
            folder = Path(f"/proc/{process}")
            pages = int((folder / "statm").read_text().split()[1])
            role = "api" if process == root else _role((folder / "cmdline").read_text())
            yield ProcessMemory(process, role, pages * os.sysconf("SC_PAGE_SIZE"))
            for thread in (folder / "task").iterdir():
                pending += map(int, (thread / "children").read_text().split())


def _role(command: str) -> str:
    return next(
        (role for module, role in ROLES.items() if f"from {module} import" in command), "other"
    )
