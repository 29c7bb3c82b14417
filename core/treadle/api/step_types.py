"""Data between scheduler and executor.

All types are msgspec Structs of plain values, so that they can be sent to workers in other processes.
"""

from __future__ import annotations

import msgspec

from treadle.api.sampling_params import SamplingParams

__all__ = (
    "EngineInfo",
    "GrammarOutput",
    "KVCacheGroup",
    "ModelRunnerOutput",
    "NewSequenceData",
    "PageTableUpdate",
    "SchedulerOutput",
    "TokenLogprobs",
)


class KVCacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share page tables. ``page_bytes`` is for all layers, keys and values.

    ``window`` is the number of tokens that a token attends to, including itself; ``None`` if all.
    """

    kind: str
    window: int | None
    num_pages: int
    layers: int
    page_bytes: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Information about a started executor, for frontend and scheduler."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    page_size: int
    kv_cache_groups: list[KVCacheGroup]
    num_async_steps: int
    """Steps that may stay in flight while the next one is scheduled: 1 on CUDA, 0 on a CPU."""
    eos_token_ids: list[int]
    max_graph_tokens: int = 0
    """Tokens up to which a step replays CUDA graphs."""
    attention: str = ""
    weights_bytes: int = 0
    report: list[str] = []
    stages: dict[str, float] = {}
    """Seconds of each stage of the start-up, in order."""


class NewSequenceData(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that gets a slot, with the data that workers need while it has the slot.

    ``token_ids`` are prompt and, after a preemption, output ids. ``bad_words`` are encoded.
    """

    slot: int
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]
    seed: int
    stop_token_ids: list[int]
    bad_words: list[list[int]]


class PageTableUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Write ``pages`` to row ``slot`` of ``group``'s page table, starting at column ``start``."""

    group: int
    slot: int
    start: int
    pages: list[int]


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """A step: row ``r`` computes ``num_scheduled_tokens[r]`` tokens of ``slots[r]``.

    The row has ``num_computed_tokens[r]`` tokens before the step. The first ``num_decodes`` rows
    compute one token each, the one last sampled in the slot, which is on the device. ``tokens`` are
    the ids of the other rows, packed. A token is sampled for row ``r`` if ``needs_sampling[r]``.
    """

    id: int
    slots: list[int]
    num_computed_tokens: list[int]
    num_scheduled_tokens: list[int]
    num_decodes: int
    tokens: list[int]
    needs_sampling: list[bool]
    new_sequences: list[NewSequenceData]
    freed_slots: list[int]
    page_table_updates: list[PageTableUpdate]
    defer_sampling: bool = False
    """Whether sampling is deferred, because a row needs a bitmask or a logits processor:
    ``execute_model`` then stops before sampling, and ``sample_tokens`` completes the step."""


class GrammarOutput(msgspec.Struct, frozen=True, array_like=True):
    """Bitmasks for ``rows`` of a step with deferred sampling.

    ``bitmask`` has equally many little-endian int32 words for each row, enough for the vocabulary.
    Bit ``i % 32`` of word ``i // 32`` is token id ``i``; 1 is allowed. It is the engine's buffer, and
    stays as it is until the output of the step has come.
    """

    rows: list[int]
    bitmask: memoryview


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the sampled token, then the most probable ones."""

    ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the sampled token, from 1."""


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of a step: a sampled token for each row with ``needs_sampling``, in order.

    ``logprobs`` and ``prompt_logprobs`` are by row, for rows that requested them. ``invalid_rows`` are indices into
    ``sampled_token_ids`` of rows with only NaN or masked logits. A failed step has ``error`` and no tokens.
    """

    id: int
    sampled_token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    invalid_rows: list[int] = []
    error: str | None = None
    row_errors: dict[int, str] = {}
    """Errors of logits processors, for rows in ``invalid_rows``."""
    compilations: int = 0
    """``EngineStats.compilations_in_service`` until now, of the rank that answers."""
