"""Threads on virtual time: of pools, of the text side, and what waits for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from simulator.world import Violation, World

__all__ = ("Ended", "SimulatedEvent", "SimulatedPool", "SimulatedThread", "sleep")


class Ended(SystemExit):
    """The episode is over, and a thread sleeps in it."""


class LockstepThread:
    """A thread that runs only while the world waits for it: from one ``sleep`` to the next."""

    def __init__(self, world: World, call: Callable[[], object]) -> None:
        self._world, self._call = world, call
        self._its_turn, self._worlds_turn = threading.Lock(), threading.Lock()
        self._its_turn.acquire()
        self._worlds_turn.acquire()
        threading.Thread(target=self._main, daemon=True).start()

    def _main(self) -> None:
        self._its_turn.acquire()
        try:
            self._call()
        except (Violation, Ended):
            pass  # the world has noted it
        except BaseException as error:
            self._world.note_violation(f"a thread raised {error!r}")
        self._world.sleeping.pop(self, None)
        self._worlds_turn.release()

    def resume(self) -> None:
        """Let it run until it sleeps or ends."""
        before, self._world.thread = self._world.thread, self
        self._its_turn.release()
        self._worlds_turn.acquire()
        self._world.thread = before

    def sleep(self, seconds: float) -> None:
        if not self._world.is_over:
            self._world.sleeping[self] = None
            self._world.after(seconds, self.resume)
            self._worlds_turn.release()
            self._its_turn.acquire()
            self._world.sleeping.pop(self, None)
        if self._world.is_over:
            raise Ended


def sleep(world: World, seconds: float) -> None:
    """Wait in a thread of a pool, while everything else goes on."""
    assert world.thread is not None
    world.thread.sleep(seconds)


class SimulatedPool:
    """``ThreadPoolExecutor``."""

    def __init__(self, world: World, max_workers: int) -> None:
        self.world, self._idle = world, max_workers
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_shut = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: call(*args)))
        self._start()
        return future

    def _start(self) -> None:
        if self._idle and self._jobs:
            self._idle -= 1
            self.world.after(self.world.random.random() * 0.002, self._begin)

    def _begin(self) -> None:
        LockstepThread(self.world, self._work).resume()

    def _work(self) -> None:
        while self._jobs:
            future, call = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        self._idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        if cancel_futures:
            while self._jobs:
                self._jobs.popleft()[0].cancel()


class SimulatedEvent:
    """``threading.Event``: whoever waits lets the world run."""

    def __init__(self, world: World) -> None:
        self.world, self._is_set = world, False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, seconds: float) -> bool:
        return self.world.run_until(self.world.now + seconds, lambda: self._is_set)


class SimulatedThread:
    """``treadle.processes.watchdog.WatchdogThread``, whose calls happen at once."""

    def __init__(self, world: World, loop: Any, deliver: Callable[[Any], None]) -> None:
        self.world, self._loop, self._deliver = world, loop, deliver
        self.calls: deque[Any] = deque()
        self.finished: deque[Any] = deque()
        self.current: Any = None

    def wake(self, keep_running: bool = True) -> None:
        if keep_running:
            self.world.after(self.world.random.random() * 0.01, self._run)

    def _run(self) -> None:
        while self.calls:
            call = self.calls.popleft()
            call.start_time = self.world.now
            try:
                call.result = call.work()
            except Exception as error:
                call.error = error
            self.finished.append(call)
        self._loop.call_soon(self._deliver, self)
