"""The engine's side of processes that advance matchers of llguidance."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from treadle.processes.framing import FrameDecoder, receive_frame, send_frame
from treadle.processes.spawn import spawn
from treadle_structured_output_kit.matcher_process import (
    FAILED,
    FORGET,
    IS_COMPLETE,
    NOBODY,
    QUESTION,
    Integers64,
    MatcherRequest,
    Setup,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("MatcherPool", "Place")

log = logging.getLogger("treadle.structured_output")

ROWS_OF_PROCESS = 8
"""Another process is used for each so many matchers: to wake one takes as long as some masks."""
MAX_GRAMMARS, MAX_TEXTS = 64, 256
"""Grammars that a process keeps, beside those of its matchers, and texts that it is told of with a request."""
RECEIVE_BYTES = 1 << 16
START_SECONDS, ANSWER_SECONDS = 120, 10
"""The longest that processes may take to start, and one of them to answer."""

Encode = Callable[[bytes], list[int]]
Text = tuple[bytes, list[int]]
Integers = np.ndarray[tuple[int], np.dtype[np.int32]]
NONE: Integers = np.zeros(0, np.int32)


class Place:
    """Where a matcher is: its number in a process, which drops the matcher with this."""

    __slots__ = ("number", "process")

    def __init__(self, process: _MatcherProcess, number: int) -> None:
        self.process, self.number = process, number
        process.num_matchers += 1

    @property
    def failure(self) -> str | None:
        """What has become of the process, if this matcher was the one that it was busy with."""
        return self.process.failure if self.process.culprit == self.number else None

    def __del__(self) -> None:
        self.process.num_matchers -= 1
        self.process.dropped.append(self.number)


class _MatcherProcess:
    """One process. It is asked by one thread at a time, and never again once it has failed."""

    def __init__(self, sock: socket.socket, encode: Encode, current: Integers64) -> None:
        self._sock, self._encode, self._current = sock, encode, current
        self.culprit, self.failure = NOBODY, ""
        self.texts: deque[Text] = deque(maxlen=MAX_TEXTS)  # that another one has asked for
        self.asked: list[Text] = []
        self._pid = int(receive_frame(sock, START_SECONDS))
        # A time limit of the system's: Python's own takes a second call for each.
        sock.settimeout(None)
        limit = struct.pack("ll", ANSWER_SECONDS, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        self._decoder = FrameDecoder()
        self._frames: deque[bytes] = deque()
        self.is_alive = True
        self.num_matchers = 0
        self.dropped: deque[int] = deque()  # by whichever thread lets go of a place
        self._known: OrderedDict[int, None] = OrderedDict()  # keys of grammars
        self._added: list[tuple[int, int, str | None, list[int]]] = []

    def add(self, number: int, key: int, source: str, tokens: list[int]) -> Place:
        """Give it a matcher that has read ``tokens``, with the next request."""
        is_known = key in self._known
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > MAX_GRAMMARS:
            self._added.append((FORGET, self._known.popitem(last=False)[0], None, []))
        self._added.append((number, key, None if is_known else source, list(tokens)))
        return Place(self, number)

    def ask(self, numbers: Integers, tokens: Integers = NONE, rows: Integers = NONE) -> None:
        """Send a request, whose answers are to be received."""
        if not self.is_alive:
            return
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        parts = numbers.tobytes(), tokens.tobytes(), rows.tobytes()
        texts = [self.texts.popleft() for _ in range(len(self.texts))]
        request = MatcherRequest(dropped, self._added, texts, *parts)
        self._added = []
        try:
            send_frame(self._sock, msgspec.msgpack.encode(request))
        except OSError as error:
            self._end(error)

    def answer(self, count: int) -> bytes:
        """Return a byte for each matcher that was asked for: ``FAILED`` for all, if the process has failed."""
        try:
            while self.is_alive:
                reply = self._receive()
                if reply[:1] != QUESTION:
                    return reply[1:]
                ids = self._encode(reply[1:])
                self.asked.append((reply[1:], ids))
                send_frame(self._sock, np.array(ids, dtype=np.int32).tobytes())
        except Exception as error:  # without its ids the process cannot go on, either
            self._end(error)
        return bytes([FAILED]) * count

    def _receive(self) -> bytes:
        while not self._frames:
            data = self._sock.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionError("it has ended")
            self._frames.extend(self._decoder.feed(data))
        return self._frames.popleft()

    def _end(self, error: Exception) -> None:
        """Kill it: its matchers go on in the engine's process, but for one that it may have failed of."""
        self.is_alive = False
        self._sock.close()
        if isinstance(error, OSError):
            self.culprit, self.failure = int(self._current[0]), f"{type(error).__name__}: {error}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        log.warning(
            "process %d, which advances grammars, has failed (%s: %s); its %d sequences go on without it",
            self._pid, type(error).__name__, error, self.num_matchers,
        )  # fmt: skip


class _Batch:
    """Places and, for each of their processes, the indices of its own and the numbers of these."""

    def __init__(self, places: list[Place | None]) -> None:
        self.places = places
        parts: dict[_MatcherProcess, list[int]] = {}
        for index, place in enumerate(places):
            if place is not None:
                parts.setdefault(place.process, []).append(index)
        numbers = np.array([-1 if p is None else p.number for p in places], dtype=np.int32)
        self.parts = [(p, np.array(own), numbers[own]) for p, own in parts.items()]

    def answers(self) -> list[bool | None]:
        """Receive an answer of each process: whether it says ``IS_COMPLETE``, ``None`` for ``FAILED``."""
        results = np.full(len(self.places), FAILED, dtype=np.uint8)
        for process, indices, _ in self.parts:
            results[indices] = np.frombuffer(process.answer(len(indices)), np.uint8)
        found: list[bool | None] = (results == IS_COMPLETE).tolist()
        for index in np.flatnonzero(results == FAILED):
            found[index] = None
        return found


class MatcherPool:
    """Processes that advance matchers and write their masks to shared memory. Used by one thread at a time.

    They start in a thread, which takes seconds; until then, and if they cannot, ``place`` does nothing. Mostly
    a step has the matchers of the one before in the same rows: masks are filled there as soon as tokens are
    accepted, and ``fill_bitmasks`` only waits for them.
    """

    def __init__(self, setup: Setup, encode: Encode, bitmask: Tensor, max_processes: int) -> None:
        self.bitmask_at = bitmask.data_ptr()
        """Where the only masks are that the processes can write."""
        self._processes: list[_MatcherProcess] = []
        self._numbers = itertools.count()
        self._batch, self._rows = _Batch([]), NONE  # of the last masks
        self._is_filling = False
        self._filled: list[bool | None] = []
        self._count = min(max_processes, len(os.sched_getaffinity(0)) // 2)
        arguments = weakref.ref(self), setup, encode, bitmask
        thread = threading.Thread(
            target=_start, args=arguments, name="treadle-matchers", daemon=True
        )
        if self._count:
            thread.start()

    def start(self, sockets: list[socket.socket], encode: Encode, masks_fd: int) -> None:
        """Let the server of the first of ``sockets`` fork the processes, whose own it adds. Raises ``OSError``."""
        started = []
        for _ in range(self._count):
            mine, its = socket.socketpair()
            sockets.append(mine)
            current_fd = os.memfd_create("treadle-matcher")
            os.ftruncate(current_fd, mmap.PAGESIZE)
            current = np.frombuffer(mmap.mmap(current_fd, 0), np.int64)
            current[0] = NOBODY
            with its:
                socket.send_fds(sockets[0], [b"\0"], [its.fileno(), masks_fd, current_fd])
            os.close(current_fd)
            started.append(_MatcherProcess(mine, encode, current))
        self._processes = started

    def place(self, key: int, source: str, tokens: list[int]) -> Place | None:
        """Return a new place for a matcher of the grammar ``key`` that has read ``tokens``."""
        alive = [process for process in self._processes if process.is_alive]
        if not alive:
            return None
        total = sum(process.num_matchers for process in alive)
        least = min(alive[: 1 + total // ROWS_OF_PROCESS], key=lambda p: p.num_matchers)
        return least.add(next(self._numbers), key, source, tokens)

    def accept_tokens(self, places: list[Place | None], tokens: Sequence[int]) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says, for matchers that have a place."""
        self._finish_filling()
        values = np.array(tokens, dtype=np.int32)
        self._is_filling, self._filled = self._batch.places == places, []
        batch = self._batch if self._is_filling else _Batch(places)
        for process, indices, numbers in batch.parts:
            process.ask(numbers, values[indices], self._rows[indices] if self._is_filling else NONE)
        return batch.answers()

    def fill_bitmasks(self, places: list[Place | None], rows: Sequence[int]) -> list[bool | None]:
        """Likewise, in the memory at ``bitmask_at``."""
        wanted = np.array(rows, dtype=np.int32)
        filled, self._filled = self._finish_filling() or self._filled, []
        if filled and self._batch.places == places and np.array_equal(self._rows, wanted):
            return filled
        self._batch, self._rows = _Batch(places), wanted
        for process, indices, numbers in self._batch.parts:
            process.ask(numbers, rows=wanted[indices])
        return self._batch.answers()

    def settle(self) -> None:
        """Wait until no process writes masks. What was filled is of use to the next call alone."""
        self._filled = self._finish_filling()

    def _finish_filling(self) -> list[bool | None]:
        """Return the answers for masks that were filled ahead, if nobody has waited for them."""
        found = self._batch.answers() if self._is_filling else []
        self._is_filling = False
        # What one has asked for the others soon will, too.
        for process in self._processes:
            asked, process.asked = process.asked, []
            for other in self._processes if asked else ():
                if other is not process:
                    other.texts += asked
        return found


def _start(pool: weakref.ref[MatcherPool], setup: Setup, encode: Encode, bitmask: Tensor) -> None:
    try:
        masks_fd = bitmask.untyped_storage()._share_fd_cpu_()[0]
        child, server = spawn("treadle_structured_output_kit.matcher_process:main")
    except (OSError, RuntimeError) as error:
        log.warning("grammars advance in the engine's process alone: %s", error)
        return
    sockets = [server]
    try:
        send_frame(server, msgspec.msgpack.encode(setup))
        receive_frame(server, START_SECONDS)
        if (alive := pool()) is not None:
            alive.start(sockets, encode, masks_fd)
            weakref.finalize(alive, _end, child, sockets)
            return
    except OSError as error:
        if pool() is not None:
            log.warning("grammars advance in the engine's process alone: %s", error)
    _end(child, sockets)


def _end(child: subprocess.Popen[bytes], sockets: Sequence[socket.socket]) -> None:
    """End the process that forks, and with it the forks."""
    for sock in sockets:
        sock.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
