"""The servers that run on this machine, as ``treadle ps`` lists them.

Each server has a file in this user's runtime folder and a lock on it as long as it lives. A file that
nobody has locked was left by a server that was killed: whoever lists the servers removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from treadle_server.context import ServerContext

__all__ = ("RunningServer", "published", "running_servers", "runtime_folder")

REFRESH_SECONDS = 2.0
MAX_BYTES = 64 * 2**10


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server. ``started`` is in seconds since the epoch; requests are counted by the engine."""

    pid: int
    url: str
    models: list[str]
    started: float
    version: str
    finished: int = 0
    running: int = 0
    waiting: int = 0


def runtime_folder() -> Path:
    """The folder of the files; it may not exist."""
    from platformdirs import user_runtime_path

    with warnings.catch_warnings():  # without a login session it is a folder of /tmp, which is said
        warnings.simplefilter("ignore")
        return user_runtime_path("treadle", appauthor=False) / "servers"


def is_private(folder: Path) -> bool:
    """Whether the folder and the two around it are this user's: anybody may write to /tmp."""
    for place in (folder, folder.parent, folder.parent.parent):
        status = os.lstat(place)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
    return True


@contextlib.asynccontextmanager
async def published(
    context: ServerContext, url: str, folder: Path | None = None
) -> AsyncIterator[None]:
    """List the server until the block ends. Where no file can be written it is only not listed."""
    folder = folder or runtime_folder()
    started = time.time()
    try:
        descriptor, path = _open(folder)
    except OSError:
        yield
        return
    task = asyncio.create_task(_refresh(descriptor, context, url, started))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _open(folder: Path) -> tuple[int, Path]:
    """Return a locked file in a folder that only this user can write to. Raises ``OSError``."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} is not a folder of this user")
    path = folder / f"{os.getpid()}-{time.monotonic_ns()}.json"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # A lock of this process: children that inherit the file do not hold it.
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor, path


async def _refresh(descriptor: int, context: ServerContext, url: str, started: float) -> None:
    import treadle

    while True:
        stats = context.stats
        state = RunningServer(
            pid=os.getpid(),
            url=url,
            models=list(context.names),
            started=started,
            version=treadle.__version__,
            finished=sum(stats.finished.values()) if stats else 0,
            running=stats.num_running if stats else 0,
            waiting=stats.num_waiting if stats else 0,
        )
        line = msgspec.json.encode(state) + b"\n"
        with contextlib.suppress(OSError):  # a full disk costs the figures
            os.pwrite(descriptor, line, 0)
            os.ftruncate(descriptor, len(line))
        await asyncio.sleep(REFRESH_SECONDS)


def running_servers(folder: Path | None = None) -> Iterator[RunningServer]:
    """Yield the servers of this user, and remove the files of those that are gone."""
    folder = folder or runtime_folder()
    if not folder.is_dir() or not is_private(folder):
        return
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                content = os.read(file, MAX_BYTES).partition(b"\n")[0]
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    yield msgspec.json.decode(content, type=RunningServer)
                else:
                    path.unlink()
            finally:
                os.close(file)
