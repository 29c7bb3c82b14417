"""How many prompt tokens a step has time for, by what the steps before it took."""

from __future__ import annotations

import math
import sys
import time
from operator import mul

from treadle.scheduler.step import InFlightStep

__all__ = ("ALONE_FACTOR", "MIN_CHUNK", "StepPace")

MIN_CHUNK = 16
"""Chunks are cut to multiples of it, and one prompt of each step gets at least as much."""
ALONE_FACTOR = 4
"""How much longer a step may take while nobody generates: only arrivals and aborts wait for it."""
SHARE_OF_FIRST = 0.75
"""Part of the time that a prompt may take while others wait for theirs, so that a short prompt behind a
long one begins at once."""
MIN_SECONDS = 1e-6
# Variances of a Kalman filter on the logarithms of the weights: of the first weights, of the times
# that are measured, and of the change of the machine from one step to the next.
FIRST_VARIANCE, NOISE, DRIFT = 2.0, 0.05, 0.002
PROBE_PERIOD = 16
"""Every so many steps those who generate are alone: if all steps had prompts, their times would not show
how much of it the prompts take."""
MAX_CHANGE = math.log(2)


class StepPace:
    """Bounds the predicted time of steps and learns from the measured one.

    The time of a step is taken as a sum of six terms (``InFlightStep.work``), each with a weight. The
    last is for steps with prompts that are too long for a CUDA graph, so that each kernel is launched.
    After a step, the weights change by as much as they have part in the prediction and are uncertain; they
    stay positive, and no unit has to be known. A step doubles or halves a weight at most: one that
    compiled a kernel does not count as a measure of the next.
    """

    def __init__(
        self, max_seconds: float, first_chunk: int = MIN_CHUNK, graph_tokens: int = 0
    ) -> None:
        """``max_seconds`` of 0 sets no bound; then nothing is measured either.

        ``first_chunk`` tokens of a prompt are believed to fit into it before anything was measured.
        A step of up to ``graph_tokens`` tokens replays a CUDA graph.
        """
        self.max_seconds = max_seconds
        self.graph_tokens = graph_tokens
        units = (16, *(n * first_chunk for n in (4, 1, 2**12, 2**16)), 64)
        self.weights = [max_seconds / n for n in units]
        self._covariance = [[FIRST_VARIANCE * (i == j) for j in range(6)] for i in range(6)]
        self._end_time = 0.0

    def seconds(self, work: list[float]) -> float:
        """Return the predicted time of a step."""
        return _dot(self.weights, work)

    def start(self, step: InFlightStep, *, is_shared: bool) -> None:
        """Give ``step``, which has its decodes, the time that is left for prompts.

        This is at least half of the bound: prompts do not starve where generation alone takes longer.
        ``is_shared`` is whether several prompts wait for it.
        """
        if self.max_seconds:
            step.start_time = time.perf_counter()
            step.is_shared = is_shared
            step.work = [1.0, len(step), 0.0, sum(step.num_computed_tokens), 0.0, 0.0]
            bound = self.max_seconds * (1 if len(step) else ALONE_FACTOR)
            step.seconds_left = max(bound - self.seconds(step.work), bound / 2)
            if len(step) and step.id % PROBE_PERIOD == 0:
                step.seconds_left = 0.0

    def max_tokens(self, step: InFlightStep, start: int) -> int:
        """Return how many tokens of a prompt, from position ``start`` on, ``step`` has time for."""
        if not self.max_seconds:
            return sys.maxsize
        _, row, token, read, attend, launch = self.weights
        seconds = step.seconds_left * (SHARE_OF_FIRST if step.is_shared else 1.0)
        seconds -= row + read * start
        # The positive solution of attend/2 n² + linear n = seconds.
        linear = token + read + attend * start

        def solve(seconds: float) -> float:
            root = math.sqrt(linear * linear + 2 * attend * max(seconds, 0.0))
            return 2 * seconds / (linear + root)

        tokens = min(solve(seconds), self.graph_tokens - sum(step.num_scheduled_tokens))
        if not 0 < 2 * step.num_decodes <= self.graph_tokens:  # else no launch keeps them waiting
            tokens = max(tokens, solve(seconds - launch * (not step.work[-1])))
        if tokens >= MIN_CHUNK:
            return int(tokens) // MIN_CHUNK * MIN_CHUNK
        return 0 if step.has_chunk or not step.seconds_left else MIN_CHUNK

    def add_chunk(self, step: InFlightStep, start: int, count: int) -> None:
        """Take the time of a chunk from ``step``."""
        if self.max_seconds:
            attended = count * (start + count / 2)
            is_launched = sum(step.num_scheduled_tokens) > self.graph_tokens
            launch = is_launched - step.work[-1]
            chunk = [0.0, 1.0, count, start + count, attended, launch]
            step.work = [a + b for a, b in zip(step.work, chunk, strict=True)]
            step.seconds_left -= self.seconds(chunk)

    def learn(self, step: InFlightStep) -> None:
        """Take the time until now as that of ``step``: from its launch, or the end of the step before."""
        if not self.max_seconds:
            return
        now = time.perf_counter()
        seconds = max(now - max(step.start_time, self._end_time), MIN_SECONDS)
        self._end_time = now
        predicted = self.seconds(step.work)
        error = _clip(math.log(seconds / predicted))
        # What a relative change of each weight adds to the prediction.
        parts = [w * units / predicted for w, units in zip(self.weights, step.work, strict=True)]
        spread = [_dot(row, parts) for row in self._covariance]
        variance = _dot(parts, spread) + NOISE
        for i, row in enumerate(self._covariance):
            gain = spread[i] / variance
            self.weights[i] *= math.exp(_clip(gain * error))
            row[:] = [value - gain * s for value, s in zip(row, spread, strict=True)]
            if row[i] < FIRST_VARIANCE:
                row[i] += DRIFT


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(mul, left, right), 0.0)


def _clip(change: float) -> float:
    return min(max(change, -MAX_CHANGE), MAX_CHANGE)
