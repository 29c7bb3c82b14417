"""A download is announced again while it makes progress, and not if nothing arrives."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from treadle_worker_kit.download import MIN_BYTES, DownloadProgress, bytes_written
from treadle_worker_kit.stages import DOWNLOAD


def test_a_download_is_announced_while_bytes_arrive() -> None:
    announced: queue.SimpleQueue[str] = queue.SimpleQueue()
    polls = threading.Semaphore(0)
    counts = iter([0, MIN_BYTES, MIN_BYTES + 1, 2 * MIN_BYTES])

    def written() -> int:
        polls.release()
        return next(counts, 2 * MIN_BYTES)

    progress = DownloadProgress(announced.put, written, poll_seconds=0.001)
    progress.enter("plugins")
    progress.enter(DOWNLOAD)
    for _ in range(8):  # polls beyond the last change
        assert polls.acquire(timeout=30)
    progress.enter("configuration")
    seen = [announced.get(timeout=30) for _ in range(5)]
    assert seen == ["plugins", DOWNLOAD, DOWNLOAD, DOWNLOAD, "configuration"]
    assert announced.empty()


def test_what_the_process_writes_is_counted(tmp_path: Path) -> None:
    before = bytes_written()
    (tmp_path / "file").write_bytes(bytes(MIN_BYTES))
    assert bytes_written() - before >= MIN_BYTES
