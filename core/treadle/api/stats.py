"""The engine's statistics."""

from __future__ import annotations

import msgspec

__all__ = ("CacheStats", "EngineStats")


class CacheStats(msgspec.Struct, frozen=True, array_like=True):
    """What a cache holds and may hold at most. Bytes are 0 where the entries are the bound."""

    entries: int
    max_entries: int
    bytes: int = 0
    max_bytes: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics after a step: totals since the start, and current values. Times are wall-clock."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    steps_by_tokens: dict[int, int] = {}
    """Steps that computed at most ``2**key`` tokens and more than half of that, ``step_tokens`` in all."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    finished: dict[str, int] = {}
    """Finished sequences by reason: stop, length, abort, error."""
    step_seconds: float = 0.0
    integrity_faults: int = 0
    compilations_in_service: int = 0
    """Kernels of Triton that were compiled or read from disk after the start."""
    num_grammars_waiting: int = 0
    grammars_compiled: int = 0
    grammars_failed: int = 0
    grammars_rejected: int = 0
    plugin_calls: list[tuple[str, str, str, int]] = []
    """Plugin calls: ``kind:key``, hook or method, ``ok``/``slow``/``error``, number of calls."""
    plugin_seconds: list[tuple[str, str, int, float]] = []
    """Plugin times: ``kind:key``, hook or method, number of calls, total seconds."""
    plugin_states: dict[str, str] = {}
    """``loaded`` or ``broken``, by ``kind:key``."""
    caches: dict[str, CacheStats] = {}
    """Every cache of the engine that grows with requests, by name."""
