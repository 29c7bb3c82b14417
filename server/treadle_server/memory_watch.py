"""Says which process the system has killed because memory ran out: nobody else is told.

Linux counts such kills for the container, or for the machine. Which process it was, and how much it
had, is known from the last look at the processes of the server.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from treadle_server.child_processes import ProcessMemory, child_memory

__all__ = ("MemoryWatch",)

log = logging.getLogger("treadle.server")

COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)
SIGKILL = "SIGKILL"


class MemoryWatch:
    """The processes below this one, and how often the system has killed for want of memory."""

    def __init__(self, counters: Sequence[Path] = COUNTERS) -> None:
        self._counters = counters
        self._kills = self._count()
        self._processes: dict[int, ProcessMemory] = {}
        self._victims: set[str] = set()

    def look(self) -> None:
        """Look at counter and processes; log the processes that are gone if memory has run out."""
        kills, processes = self._count(), child_memory()
        if kills is not None and self._kills is not None and kills > self._kills:
            gone = [p for pid, p in self._processes.items() if pid not in processes]
            self._victims.update(p.role for p in gone)
            names = ", ".join(f"{p.role} (process {p.pid}, {_gib(p.bytes)})" for p in gone)
            log.error(
                "memory ran out, and the system killed %d process%s; of this server: %s",
                kills - self._kills,
                "" if kills - self._kills == 1 else "es",
                names or "none that is known",
                extra={"incident": "memory"},
            )
        self._kills, self._processes = kills, processes

    def explain(self, reason: str, role: str = "engine") -> str:
        """Return what is to be added to the ``reason`` of the end of a process: why it was killed."""
        if SIGKILL not in reason:
            return ""
        before, now = self._kills, self._count()
        processes = [p for p in self._processes.values() if p.role == role]
        used = f"; it had {_gib(max(p.bytes for p in processes))}" if processes else ""
        if before is None or now is None:
            return f" (probably out of memory{used})"
        if now > before or role in self._victims:
            return f" (out of memory: the system killed it{used})"
        return f" (not for want of memory, as the system counts it{used})"

    def _count(self) -> int | None:
        """Return how many processes were killed for want of memory, ``None`` if nobody counts."""
        for counter in self._counters:
            with contextlib.suppress(OSError, ValueError):
                lines = counter.read_text().splitlines()
                fields = dict(line.split(None, 1) for line in lines)
                if "oom_kill" in fields:
                    return int(fields["oom_kill"])
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
