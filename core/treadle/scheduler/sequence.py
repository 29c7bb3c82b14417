"""The scheduler's state of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo, TokenLogprobs
from treadle.structured_output.state import StructuredOutputState

__all__ = ("SequenceState",)


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """State of a sequence from its arrival in the queue until it is finished.

    ``token_ids`` are the ids known on the CPU side: prompt, then output. ``num_tokens`` and ``num_computed_tokens``
    include the steps in flight: tokens that are known or will be sampled, and tokens with keys and values in the
    cache. ``slot`` is -1 while it waits. While ``last_on_device`` is set, exactly one token is not computed: the
    last one sampled in the slot. ``defer_sampling`` is set if the CPU side needs each token before the next one is
    sampled, ``may_jump`` if the sampler needs none of the tokens that a grammar forces.
    """

    request: EngineRequest
    info: InitVar[EngineInfo]
    root_hash: bytes
    seed: int
    id: str = field(init=False)
    params: SamplingParams = field(init=False)
    arrival_time: float = field(init=False)
    priority: int = field(init=False)
    client: str = field(init=False)
    extra_args: Mapping[str, Any] = field(init=False)
    prefix_leader: str | None = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    vocab_size: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    page_tables: list[list[int]] = field(init=False)
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False)
    may_jump: bool = field(init=False)
    scheduled_time: float | None = None
    slot: int = -1
    page_hashes: list[bytes] = field(default_factory=list)
    num_cached_pages: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    last_on_device: bool = False
    finished: bool = False
    grammar_state: StructuredOutputState | None = None
    defer_sampling: bool = False
    sort_key: tuple[float, ...] = ()

    def __post_init__(self, info: EngineInfo) -> None:
        request, params = self.request, self.request.params
        self.id, self.params, self.prefix_leader = request.id, params, request.prefix_leader
        self.arrival_time, self.priority = request.arrival_time, params.priority
        self.client, self.extra_args = request.client, params.extra_args or {}
        self.token_ids = list(request.prompt_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        remaining = info.max_model_len - self.num_prompt_tokens
        requested = remaining if params.max_tokens is None else params.max_tokens
        self.max_num_tokens = self.num_prompt_tokens + min(requested, remaining)
        ends = () if params.ignore_eos else info.eos_token_ids
        self.stop_token_ids = frozenset((*(params.stop_token_ids or ()), *ends))
        self.page_tables, self.vocab_size = [[] for _ in info.kv_cache_groups], info.vocab_size
        self.prompt_logprobs = None if params.prompt_logprobs is None else []
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        is_plain = penalties == (1.0, 0.0, 0.0) and params.logprobs is None
        self.may_jump = is_plain and not self.extra_args and not request.bad_words

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that the steps in flight will sample."""
        return self.num_tokens - len(self.token_ids)

    def forbidden_ids(self) -> list[int]:
        """Return the ids that ``bad_words`` and ``min_tokens`` forbid for the next token."""
        if not self.request.bad_words and not self.params.min_tokens:
            return []
        length = len(self.token_ids)
        ids = [
            word[-1]
            for word in self.request.bad_words
            if self.token_ids[max(0, length - len(word) + 1) :] == word[:-1]
        ]
        if self.num_output_tokens < self.params.min_tokens:
            ids += self.stop_token_ids
        return ids

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    def __repr__(self) -> str:
        return (
            f"SequenceState({self.id!r}, {self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed_tokens} computed, slot {self.slot})"
        )
