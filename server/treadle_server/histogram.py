"""A histogram with a cost of one bisection per observation: it counts every streamed chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ("LATENCY", "LENGTHS", "SHORT", "Histogram")

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
LENGTHS = tuple(float(2**i) for i in range(0, 21, 1))


class Histogram:
    """Counts observations by upper bound. Used from the event loop only."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with their upper bounds, as Prometheus expects them."""
        result, total = [], 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            result.append((f"{bound:g}", float(total)))
        result.append(("+Inf", float(total + self._counts[-1])))
        return result
