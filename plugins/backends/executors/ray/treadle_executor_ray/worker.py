"""One rank inside a Ray actor: bytes in, bytes out, and a line that ends when the rank does."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import ray

from treadle.config import patient_threads
from treadle.runner.worker_messages import Collected, Start, Started, decode_order, encode

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from treadle.runner.worker import Rank

__all__ = ("LIFE", "Worker")

LIFE = "life"
"""The concurrency group of ``lifeline``, which runs beside the orders."""


class Worker:
    """The body of an actor. Orders come one at a time and in order; nobody else calls it.

    An order that fails answers ``None``; what went wrong is said once, by ``lifeline``.
    """

    def __init__(self) -> None:
        patient_threads()  # torch is not imported before the first order
        self._rank: Rank | None = None
        self._port: socket.socket | None = None
        self._last_words: bytes | None = None
        self._over = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def meeting(self) -> str:
        """Open a port on this node's address, where the ranks will meet: ``host:port``.

        It is open from now on, so nobody can take it before the ranks do.
        """
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = socket.create_server((host, 0), family=family)
        return f"{host}:{self._port.getsockname()[1]}"

    def obey(self, data: bytes) -> bytes | None:
        """Carry out one order; ``Start`` and, on rank 0, ``Collect`` have an answer."""
        if self._over.is_set():
            return None
        try:
            order = decode_order(data)
            if isinstance(order, Start):
                return self._start(order)
            if self._rank is None:
                raise RuntimeError(f"the first order is {type(order).__name__}")
            result = self._rank.obey(order)
            return b"" if result is None else encode(Collected(result))
        except BaseException as error:
            from treadle.runner.worker import failed

            self._last_words = encode(failed(error))
            self._over.set()
            return None

    def lifeline(self) -> bytes | None:
        """Return when the rank has failed, with the reason. Ray ends it when the process dies."""
        self._over.wait()
        return self._last_words

    def _start(self, start: Start) -> bytes:
        from treadle.runner.worker import Rank

        self._rank = Rank(start, self._store(start))
        return encode(Started(self._rank.facts))

    def _store(self, start: Start) -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from treadle.runner.collective import START_TIMEOUT

        host, _, port = start.meeting.rpartition(":")
        listener = None if self._port is None else self._port.detach()
        self._port = None
        # Nobody waits here for the other ranks: the process group does, with its own timeout.
        return TCPStore(
            host,
            int(port),
            start.size,
            is_master=listener is not None,
            timeout=START_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
