"""The scheduler's state of a sequence."""

from __future__ import annotations

from treadle.api.requests import EngineRequest
from treadle.api.step_types import EngineInfo, TokenLogprobs
from treadle.structured_output.state import StructuredOutputState

__all__ = ("SequenceState",)


class SequenceState:
    """State of a sequence from its arrival in the queue until it is finished.

    ``token_ids`` are the ids known on the CPU side: prompt, then output. ``num_tokens`` and
    ``num_computed_tokens`` include the steps in flight: tokens that are known or will be sampled,
    and tokens with keys and values in the cache. ``slot`` is -1 while it waits. While
    ``last_on_device`` is set, exactly one token is not computed: the last one sampled in the slot.
    ``defer_sampling`` is set if the CPU side needs each token before the next one is sampled,
    ``may_jump`` if the sampler needs none of the tokens that a grammar forces.
    """

    __slots__ = (
        "arrival_time",
        "client",
        "defer_sampling",
        "extra_args",
        "finished",
        "grammar_state",
        "id",
        "last_on_device",
        "max_num_tokens",
        "may_jump",
        "num_cached_pages",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "page_hashes",
        "page_tables",
        "params",
        "prefix_leader",
        "priority",
        "prompt_logprobs",
        "request",
        "root_hash",
        "scheduled_time",
        "seed",
        "slot",
        "sort_key",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self, request: EngineRequest, info: EngineInfo, root_hash: bytes, seed: int
    ) -> None:
        params = request.params
        self.id = request.id
        self.request = request
        self.params = params
        self.arrival_time = request.arrival_time
        self.scheduled_time: float | None = None
        self.priority = params.priority
        self.client, self.extra_args = request.client, params.extra_args or {}
        self.prefix_leader = request.prefix_leader
        self.token_ids = list(request.prompt_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        remaining = info.max_model_len - self.num_prompt_tokens
        requested = remaining if params.max_tokens is None else params.max_tokens
        self.max_num_tokens = self.num_prompt_tokens + min(requested, remaining)
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops.update(info.eos_token_ids)
        self.stop_token_ids = frozenset(stops)
        self.seed = seed
        self.slot = -1
        self.page_tables: list[list[int]] = [[] for _ in info.kv_cache_groups]
        self.page_hashes: list[bytes] = []
        self.root_hash = root_hash
        self.num_cached_pages = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.last_on_device = False
        self.num_cached_tokens = 0
        self.finished = False
        self.grammar_state: StructuredOutputState | None = None
        self.defer_sampling = False
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        is_plain = penalties == (1.0, 0.0, 0.0) and params.logprobs is None
        self.may_jump = is_plain and not self.extra_args and not request.bad_words
        self.sort_key: tuple[float, ...] = ()
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            [] if params.prompt_logprobs is not None else None
        )

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
