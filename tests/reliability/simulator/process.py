"""The engine's process and the socket to it: bytes that take time, and ends that come early."""

from __future__ import annotations

import asyncio
import select
import subprocess
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from simulator.world import EPSILON, World
from treadle.engine.process import Channel

__all__ = ("EngineProcess", "EngineSocket", "Killed", "SimulatedChannel")

SPINS = 5000
"""Turns of the engine's loop without a step, after which it is taken to spin."""


class Killed(SystemExit):
    """SIGKILL, as the engine's code sees it: nothing that it does from now on has an effect."""


class Stream:
    """One direction of a socket: each event takes its time and none overtakes another."""

    def __init__(self, world: World, delay: Callable[[], float]) -> None:
        self._world, self._delay = world, delay
        self._under_way: deque[Callable[[], object]] = deque()
        self._last_arrival = 0.0

    def send(self, call: Callable[..., object], *args: Any) -> None:
        self._under_way.append(partial(call, *args))
        self._last_arrival = max(self._last_arrival, self._world.now + self._delay())
        self._world.at(self._last_arrival, self._arrive)

    def _arrive(self) -> None:
        self._under_way.popleft()()


class EngineSocket:
    """The engine's end of the socket pair. What is sent arrives later, in pieces, in order."""

    def __init__(self, world: World, process: EngineProcess) -> None:
        self.world, self.process = world, process
        self.inbox = bytearray()
        self.is_at_end = False
        self._stream = Stream(world, process.delay)

    def setblocking(self, flag: bool) -> None:
        pass

    def close(self) -> None:
        self.process.hang_up()

    def recv(self, size: int) -> bytes:
        self.process.check_alive()
        if not self.inbox:
            if self.is_at_end:
                return b""
            raise BlockingIOError
        data = bytes(self.inbox[:size])
        del self.inbox[:size]
        return data

    def send(self, data: memoryview) -> int:
        self.process.check_alive()
        if self.process.is_hung_up:
            raise BrokenPipeError
        draw = self.world.random.random()
        if draw < 0.02:
            raise BlockingIOError  # the buffer is full
        count = len(data) if draw < 0.9 else 1 + int(self.world.random.random() * len(data))
        self.process.to_client(bytes(data[:count]))
        return count

    def feed(self, data: bytes) -> None:
        """The client has written ``data``; it arrives after a delay, never before earlier bytes."""
        self._stream.send(self.inbox.extend, data)

    def feed_end(self) -> None:
        def end() -> None:
            self.is_at_end = True

        self._stream.send(end)

    @property
    def is_readable(self) -> bool:
        return bool(self.inbox) or self.is_at_end or self.process.is_killed


class SimulatedChannel(Channel):
    """The real channel; only its waiting lets the world run."""

    _sock: Any

    def receive(self, timeout: float) -> list[Any]:
        process = self._sock.process
        process.turns += 1
        if process.turns > SPINS:
            process.world.fail(f"the engine has work, but no step in {SPINS} turns of its loop")
        if not timeout:
            process.world.run_until(process.world.now + EPSILON)
        return super().receive(timeout)

    def _wait(self, events: int, seconds: float) -> int:
        world, sock = self._sock.world, self._sock
        sends = events & select.POLLOUT
        world.run_until(
            world.now + (min(seconds, 0.001) if sends else seconds), lambda: sock.is_readable
        )
        sock.process.check_alive()
        return (select.POLLIN if sock.is_readable else 0) | sends


class EngineProcess(asyncio.WriteTransport):
    """``Popen`` and transport of the engine in one, as the client sees it."""

    pid = 4711

    def __init__(self, world: World, run: Callable[[SimulatedChannel], int]) -> None:
        super().__init__()
        self.world = world
        self.sock = EngineSocket(world, self)
        self.status: int | None = None
        self.is_killed = False
        self.is_hung_up = False
        self.is_started = False
        self.turns = 0
        self.slow = world.random.random() < 0.2
        self._run = run
        self._protocol: asyncio.Protocol | None = None
        self._is_closing = False
        self._is_lost = False
        self._stream = Stream(world, self.delay)

    # -- the process -------------------------------------------------------------------

    def main(self) -> None:
        """Run the engine to its end. Called from the top; the world runs inside its waits."""
        self.is_started = True
        try:
            status = self._run(SimulatedChannel(self.sock))  # type: ignore[arg-type]
        except Killed:
            status = -9
        self.exit(-9 if self.is_killed else status)

    def exit(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self.world.log("engine exits", status)
        self.hang_up()

    def kill(self) -> None:
        """SIGKILL. The engine's code notices at its next call of the system."""
        if self.status is None and not self.is_killed:
            self.is_killed = True
            self.world.log("engine killed")
            self.hang_up()
            if not self.is_started:
                self.exit(-9)

    def check_alive(self) -> None:
        if self.is_killed:
            raise Killed

    def poll(self) -> int | None:
        return -9 if self.is_killed else self.status

    def wait(self, seconds: float | None = None) -> int:
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("engine", seconds or 0.0)
        return status

    # -- from the engine to the client --------------------------------------------------

    def delay(self) -> float:
        draw = self.world.random.random()
        return draw * (0.05 if self.slow else 0.0005)

    def to_client(self, data: bytes) -> None:
        cut = int(self.world.random.random() * len(data)) if self.world.random.random() < 0.1 else 0
        for piece in (data[:cut], data[cut:]):
            if piece:
                self._stream.send(self._deliver, piece)

    def hang_up(self) -> None:
        """Close the engine's end: the client reads what was sent, then the end."""
        if not self.is_hung_up:
            self.is_hung_up = True
            self._stream.send(self._lose)

    def cut(self) -> None:
        """The connection ends here and now; what was under way is lost."""
        self.is_hung_up = True
        self.sock.feed_end()
        self._lose()

    def _deliver(self, data: bytes) -> None:
        if self._protocol is not None and not self._is_lost and not self._is_closing:
            self._in_loop(self._protocol.data_received, data)

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            if self._protocol is not None:
                self._in_loop(self._protocol.connection_lost, None)

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        asyncio._set_running_loop(self.loop)
        try:
            call(*args)
        finally:
            asyncio._set_running_loop(None)

    # -- the transport of the client ----------------------------------------------------

    loop: Any = None

    def start(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        if not self._is_closing and not self._is_lost:
            self.sock.feed(bytes(data))

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.sock.feed_end()
            self.world.after(EPSILON, self._lose)
