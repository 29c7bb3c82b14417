"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ("SchedulerCounters",)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started. ``finished`` counts sequences by finish reason."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
