"""Order statistics of measured times."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ("LatencyStats", "summarize")


class LatencyStats(msgspec.Struct, frozen=True):
    """Milliseconds of many measurements; all 0 if there were none."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def summarize(seconds: Sequence[float]) -> LatencyStats:
    """Summarise, with linear interpolation between the two nearest measurements."""
    if not seconds:
        return LatencyStats()
    ordered = sorted(seconds)

    def percentile(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return _ms(ordered[low] + (ordered[high] - ordered[low]) * (position - low))

    mean = sum(ordered) / len(ordered)
    return LatencyStats(
        _ms(mean), percentile(0.5), percentile(0.9), percentile(0.99), _ms(ordered[-1])
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
