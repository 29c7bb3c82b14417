"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ("SchedulerCounters",)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started, as in ``EngineStats``."""

    prompt_tokens: int = 0
    step_tokens: int = 0
    steps_by_tokens: dict[int, int] = field(default_factory=dict)
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def count_step(self, num_tokens: int) -> None:
        key = (num_tokens - 1).bit_length()
        self.step_tokens += num_tokens
        self.steps_by_tokens[key] = self.steps_by_tokens.get(key, 0) + 1
