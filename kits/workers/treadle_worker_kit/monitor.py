"""Who supervises a start: where each rank is, which one keeps the others waiting, and for how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from treadle.errors import EngineError
from treadle_worker_kit.messages import Progress

__all__ = ("FIRST_STAGE", "StartMonitor")

log = logging.getLogger("treadle.workers")

FIRST_STAGE = "process"
WARN_SECONDS = 30.0


@dataclass(slots=True)
class RankState:
    """Where a rank is. ``number`` counts its stages, which are the same ones for all ranks."""

    since: float
    stage: str = FIRST_STAGE
    number: int = 0
    is_waiting: bool = False
    has_started: bool = False


class StartMonitor:
    """The ranks of one start. ``limit`` are the seconds that a rank may be in one stage.

    The time in which a rank waits for others on the host does not count.
    """

    def __init__(
        self, world_size: int, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._limit = clock, limit
        self._ranks = [RankState(clock()) for _ in range(world_size)]
        self._warned: tuple[list[int], str] | None = None
        self._warn_after = WARN_SECONDS

    def update(self, rank: int, progress: Progress) -> None:
        """Note what a rank has said of itself."""
        state = self._ranks[rank]
        if progress.stage != state.stage:
            state.stage = progress.stage
            state.number += 1
        state.is_waiting = progress.is_waiting
        state.since = self._clock()

    def started(self, rank: int) -> None:
        """Note that a rank has started."""
        self._ranks[rank].has_started = True

    def stage_of(self, rank: int) -> str:
        """Return the stage that a rank is in."""
        return self._ranks[rank].stage

    @property
    def behind(self) -> list[int]:
        """The ranks that the others wait for: those in the earliest stage that do not wait themselves."""
        unfinished = [rank for rank, state in enumerate(self._ranks) if not state.has_started]
        busy = [rank for rank in unfinished if not self._ranks[rank].is_waiting] or unfinished
        first = min((self._ranks[rank].number for rank in busy), default=0)
        return [rank for rank in busy if self._ranks[rank].number == first]

    def check(self) -> None:
        """Log who is waited for, if it takes long. Raises ``EngineError`` beyond the limit."""
        behind = self.behind
        if not behind:
            return
        seconds = self._clock() - min(self._ranks[rank].since for rank in behind)
        stage, names = self._ranks[behind[0]].stage, _names(behind)
        if seconds > self._limit:
            others = "" if len(behind) == len(self._ranks) else "; the others wait for that"
            raise EngineError(
                f"the start hangs: {names} did not finish stage {stage!r} in {self._limit:g} s{others}. See "
                "the stacks above; if it is only slow, raise startup_timeout"
            )
        if self._warned != (behind, stage):
            self._warned, self._warn_after = (behind, stage), WARN_SECONDS
        if seconds > self._warn_after:
            log.warning("waiting for %s in stage %r of the start (%.0f s)", names, stage, seconds)
            self._warn_after *= 2


def _names(ranks: list[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 1``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
