"""The scheduler's counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ("SchedulerCounters",)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started, as in ``EngineStats``."""

    prompt_tokens: int = 0
    step_tokens: int = 0
    steps_by_tokens: Counter[int] = field(default_factory=Counter)
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
