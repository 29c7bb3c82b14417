"""The progress of a download, which no time limit of a stage may cut off while bytes arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from treadle_worker_kit.stages import DOWNLOAD, Announce

__all__ = ("DownloadProgress",)

POLL_SECONDS = 5.0
MIN_BYTES = 2**20
"""What must have been written since the last announcement: more than the lines of a log."""


class DownloadProgress:
    """Announces the stages of a start, and the download's again and again while it makes progress.

    Progress is what this process writes, to whatever file: model sources are plugins, and libraries
    that download say nothing to their caller.
    """

    def __init__(
        self,
        announce: Announce,
        written: Callable[[], int] | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """``written`` returns the bytes written so far; without it the system is asked."""
        self._announce = announce
        self._written = written or bytes_written
        self._poll_seconds = poll_seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def enter(self, stage: str) -> None:
        """Announce a stage."""
        with self._lock:
            self._ended.set()
            self._announce(stage)
        if stage == DOWNLOAD:
            self._ended = threading.Event()
            arguments = (self._ended, self._written())
            threading.Thread(
                target=self._watch, args=arguments, name="download-progress", daemon=True
            ).start()

    def _watch(self, ended: threading.Event, last: int) -> None:
        while not ended.wait(self._poll_seconds):
            if (written := self._written()) - last >= MIN_BYTES:
                last = written
                with self._lock:
                    if not ended.is_set():
                        self._announce(DOWNLOAD)


def bytes_written() -> int:
    """Return the bytes that this process has written. On systems that do not say: 0."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)
