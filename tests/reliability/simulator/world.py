"""Virtual time, seeded choices, the log of events, and the failure that a simulation ends with."""

from __future__ import annotations

import heapq
import itertools
import random
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ("EPSILON", "StepsSpent", "Violation", "World")

# What a call of the operating system takes: time passes even in a loop that never waits.
EPSILON = 2e-5


class Violation(BaseException):
    """An invariant does not hold. Not an ``Exception``: no code under test may swallow it."""


class StepsSpent(BaseException):
    """The steps that the caller wants have been run."""


class World:
    """The clock, everything that is due, and the one source of random numbers of an episode.

    A step is one callback of the event loop, one job of a thread or a device, or one step of the
    engine. Which of the callbacks that are ready runs next is chosen at random. Nothing runs while
    another callback does; time passes only between them.
    """

    def __init__(self, seed: int, max_steps: int = 10**9) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.max_steps = max_steps
        self.digest = 0
        self.events: list[str] = []
        self.ready: list[Callable[[], object]] = []
        self.violation: Violation | None = None
        self.thread: Any = None
        self.sleeping: dict[Any, None] = {}
        self.is_over = False
        self.grammar_faults: set[str] = set()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._tickets = itertools.count()

    def log(self, *event: object) -> None:
        """Add an event to the digest, which two runs of one seed have in common."""
        line = f"{self.now:.6f} {' '.join(map(str, event))}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.events.append(line)

    def count_step(self) -> None:
        if self.steps >= self.max_steps:
            raise StepsSpent
        self.steps += 1

    def note_violation(self, message: str) -> Violation:
        """Keep the first violation: ``run_until`` raises it, whoever has swallowed it before."""
        if self.violation is None:
            self.violation = Violation(f"seed {self.seed}, step {self.steps}: {message}")
        return self.violation

    def fail(self, message: str) -> NoReturn:
        raise self.note_violation(message)

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Make ``call`` ready at the time ``when``."""
        heapq.heappush(self._due, (when, next(self._tickets), call))

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        self.at(self.now + seconds, call)

    def run_until(self, when: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Run what is ready or due until ``when``, or until ``is_done``; return whether it is.

        A caller that waits in here, such as the engine's process, is resumed at that time.
        """
        while True:
            if is_done is not None and is_done():
                return True
            if self.ready:
                self._run_one()
            elif self._due and self._due[0][0] <= when:
                self.now = max(self.now, self._due[0][0])
                while self._due and self._due[0][0] <= self.now:
                    self.ready.append(heapq.heappop(self._due)[2])
            else:
                self.now = max(self.now, when)
                return False

    def end(self) -> None:
        """End the threads that sleep."""
        self.is_over = True
        while self.sleeping:
            thread, _ = self.sleeping.popitem()
            thread.resume()

    @property
    def is_idle(self) -> bool:
        """Whether nothing will ever happen again."""
        return not self.ready and not self._due

    def _run_one(self) -> None:
        ready = self.ready
        index = int(self.random.random() * len(ready)) if len(ready) > 1 else 0
        ready[index], ready[-1] = ready[-1], ready[index]
        call = ready.pop()
        self.count_step()
        call()
        if self.violation is not None:
            raise self.violation
