"""The scheduler's state of a sequence."""

from __future__ import annotations

from treadle.api.requests import EngineRequest
from treadle.api.step_types import EngineFacts, TokenLogprobs
from treadle.structured_output.state import Guide

__all__ = ("Sequence",)


class Sequence:
    """State of a sequence from its arrival in the queue until it is finished.

    ``tokens`` are the ids known on the CPU side: prompt, then output. ``num_computed_tokens``
    and ``num_pending_tokens`` include the steps in flight: tokens with keys and values in the
    cache, and sampled tokens that are not in ``tokens`` yet. ``slot`` is -1 while it waits.
    ``defer_sampling`` is set if the CPU side needs each token before the next one is sampled.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "chain",
        "computed",
        "epoch",
        "finished",
        "guide",
        "held",
        "id",
        "last_on_device",
        "leader",
        "max_len",
        "named",
        "order",
        "params",
        "pending",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "root",
        "seed",
        "slot",
        "stop_ids",
        "tables",
        "tokens",
    )

    def __init__(self, request: EngineRequest, facts: EngineFacts, root: bytes, seed: int) -> None:
        params = request.params
        self.id = request.id
        self.request = request
        self.params = params
        self.arrival = request.arrival
        self.priority = params.priority
        self.leader = request.leader
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        room = facts.max_model_len - self.prompt_len
        wanted = room if params.max_tokens is None else params.max_tokens
        self.max_len = self.prompt_len + min(wanted, room)
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops.update(facts.eos_ids)
        self.stop_ids = frozenset(stops)
        self.seed = seed
        self.slot = -1
        self.tables: list[list[int]] = [[] for _ in facts.groups]
        self.chain: list[bytes] = []
        self.root = root
        self.named = 0
        self.computed = 0
        self.pending = 0
        self.epoch = 0
        self.last_on_device = False
        self.cached_tokens = 0
        self.finished = False
        self.guide: Guide | None = None
        self.held = False
        self.order: tuple[float, ...] = ()
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            [] if params.prompt_logprobs is not None else None
        )

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def total(self) -> int:
        """Number of tokens, including those that the steps in flight will sample."""
        return len(self.tokens) + self.pending

    @property
    def running(self) -> bool:
        return self.slot >= 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id!r}, {self.prompt_len}+{self.output_len} tokens, "
            f"{self.computed} computed, slot {self.slot})"
        )
