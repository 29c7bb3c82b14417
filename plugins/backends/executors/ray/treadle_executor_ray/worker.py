"""One rank inside a Ray actor: bytes in, bytes out, and a call that returns when the rank fails."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import ray

from treadle.config import set_library_environment
from treadle_worker_kit.garbage import without_collections
from treadle_worker_kit.messages import (
    Collected,
    Progress,
    Started,
    StartWorker,
    decode_command,
    encode,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from treadle_worker_kit.worker import Worker

__all__ = ("LIFE", "WorkerActor")

LIFE = "life"
"""The concurrency group of ``wait_until_exit`` and ``progress``, which run beside the commands."""


class WorkerActor:
    """The class of the actors. Commands come one at a time and in order.

    A command that fails returns ``None``; ``wait_until_exit`` returns the reason, once.
    """

    def __init__(self) -> None:
        set_library_environment()  # torch is not imported before the first command
        self._worker: Worker | None = None
        self._port: socket.socket | None = None
        self._failure: bytes | None = None
        self._failed = threading.Event()
        self._progress: tuple[int, Progress] = (0, Progress("imports"))

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def node(self) -> str:
        """Return the id of the Ray node that this actor is on."""
        return str(ray.get_runtime_context().get_node_id())

    def rendezvous(self) -> str:
        """Open a port for the ranks to meet at. Return its address, ``host:port``.

        It stays open, so that no other program can take it before the ranks do.
        """
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = socket.create_server((host, 0), family=family)
        return f"{host}:{self._port.getsockname()[1]}"

    def execute(self, data: bytes) -> bytes | None:
        """Execute one encoded command; ``StartWorker`` and ``Collect`` have a reply."""
        if self._failed.is_set():
            return None
        try:
            command = decode_command(data)
            if isinstance(command, StartWorker):
                return self._start(command)
            if self._worker is None:
                name = type(command).__name__
                raise RuntimeError(f"the first command is {name}; expected StartWorker")
            result = self._worker.execute(command)
            return b"" if result is None else encode(Collected(result))
        except BaseException as error:
            from treadle_worker_kit.worker import failure_reply

            self._failure = encode(failure_reply(error))
            self._failed.set()
            return None

    def wait_until_exit(self) -> bytes | None:
        """Return the reason once the rank has failed. Ray ends the call if the process dies."""
        self._failed.wait()
        return self._failure

    def progress(self) -> tuple[int, bytes]:
        """Return where the start is: how often it has been reported, and the last report."""
        number, progress = self._progress
        return number, encode(progress)

    def _report(self, progress: Progress) -> None:
        self._progress = (self._progress[0] + 1, progress)

    def _start(self, start: StartWorker) -> bytes:
        with without_collections():
            from treadle_worker_kit.worker import Worker

        self._worker = Worker(start, self._store(start), self._report)
        return encode(Started(self._worker.info))

    def _store(self, start: StartWorker) -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from treadle_worker_kit.worker import START_TIMEOUT

        host, _, port = start.rendezvous.rpartition(":")
        listener = None if self._port is None else self._port.detach()
        self._port = None
        # The process group waits for the other ranks, with its own timeout; the store need not.
        return TCPStore(
            host,
            int(port),
            start.world_size,
            is_master=listener is not None,
            timeout=START_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
