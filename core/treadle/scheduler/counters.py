"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ("Counters",)


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; they only grow."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
