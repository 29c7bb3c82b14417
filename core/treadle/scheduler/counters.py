"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ("Counters",)


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. ``finished`` counts sequences by finish reason."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
