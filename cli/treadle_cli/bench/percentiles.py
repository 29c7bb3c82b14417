"""Order statistics of measured times."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ("LatencyStats", "spread")


class LatencyStats(msgspec.Struct, frozen=True):
    """Milliseconds of many measurements; all 0 if there were none."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def spread(seconds: Sequence[float]) -> LatencyStats:
    """Summarise, with linear interpolation between the two nearest measurements."""
    if not seconds:
        return LatencyStats()
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return _ms(ordered[low] + (ordered[high] - ordered[low]) * (place - low))

    mean = sum(ordered) / len(ordered)
    return LatencyStats(_ms(mean), at(0.5), at(0.9), at(0.99), _ms(ordered[-1]))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
