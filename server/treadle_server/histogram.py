"""A histogram with a cost of one bisection per observation: it counts every streamed chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.utils import floatToGoString

__all__ = ("Histogram",)


class Histogram:
    """Counts observations by upper bound. Used from the event loop only.

    Its bounds are those of every name it is served under: the counts of fewer bounds are sums.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(sorted(set(bounds)))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    @classmethod
    def of_counts(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """Return one that others have counted; ``counts`` has one more, for what is beyond the bounds."""
        histogram = cls(bounds)
        histogram._counts, histogram._sum = list(counts), total
        return histogram

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def sum(self) -> float:
        return self._sum

    @property
    def bounds(self) -> tuple[float, ...]:
        return self._bounds

    @property
    def is_empty(self) -> bool:
        return not any(self._counts)

    def __add__(self, other: Histogram) -> Histogram:
        """Return the observations of both, which have the same bounds."""
        counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        return Histogram.of_counts(self._bounds, counts, self._sum + other._sum)

    def buckets(self, bounds: Iterable[float] | None = None) -> list[tuple[str, float]]:
        """Cumulative counts with their upper bounds, as Prometheus expects them.

        ``bounds`` are some of its own, ``None`` for all.
        """
        selected = None if bounds is None else frozenset(bounds)
        result, total = [], 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            if selected is None or bound in selected:
                le = floatToGoString(bound)  # type: ignore[no-untyped-call]
                result.append((le, float(total)))
        result.append(("+Inf", float(total + self._counts[-1])))
        return result
