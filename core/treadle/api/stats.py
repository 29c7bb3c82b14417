"""What an engine says about itself after each step."""

from __future__ import annotations

import msgspec

__all__ = ("EngineStats",)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters only grow; the others are as of now. Seconds are of wall-clock time."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = {}
    """Finished sequences by reason: stop, length, abort, error."""
    step_seconds: float = 0.0
    integrity_faults: int = 0
    plugin_calls: list[tuple[str, str, str, int]] = []
    """Calls of plugins: ``kind:key``, hook or method, ``ok``, ``slow`` or ``error``, and how many."""
    plugin_seconds: list[tuple[str, str, int, float]] = []
    """The same by ``kind:key`` and hook or method: how many, and the seconds that they took."""
    plugin_states: dict[str, str] = {}
    """``loaded`` or ``broken``, by ``kind:key``."""
