"""Data between scheduler and executor.

All types are msgspec Structs of plain values, so that they can be sent to workers in other
processes.
"""

from __future__ import annotations

import msgspec

from treadle.api.sampling_params import SamplingParams

__all__ = (
    "CacheGroup",
    "EngineFacts",
    "PageWrite",
    "SlotStart",
    "StepEdits",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
)


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share page tables. ``page_bytes`` is for all layers, keys and values.

    ``window`` is the number of tokens that a token attends to, including itself; ``None`` if all.
    """

    kind: str
    window: int | None
    pages: int
    layers: int
    page_bytes: int


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Information about a started executor, for frontend and scheduler."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    page_size: int
    groups: list[CacheGroup]
    depth: int
    """Steps that may stay in flight while the next one is scheduled: 1 on CUDA, 0 on a CPU."""
    eos_ids: list[int]
    attention: str = ""
    weights_bytes: int = 0
    report: list[str] = []
    stages: dict[str, float] = {}
    """Seconds of each stage of the start-up, in order."""


class SlotStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that gets a slot, with the data that workers need while it has the slot.

    ``tokens`` are prompt and, after a preemption, output ids. ``bad_words`` are encoded.
    """

    slot: int
    params: SamplingParams
    prompt_len: int
    tokens: list[int]
    seed: int
    stop_ids: list[int]
    bad_words: list[list[int]]


class PageWrite(msgspec.Struct, frozen=True, array_like=True):
    """Write ``pages`` to row ``slot`` of ``group``'s page table, starting at column ``first``."""

    group: int
    slot: int
    first: int
    pages: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """A step: row ``r`` computes ``num_scheduled_tokens[r]`` tokens of ``slots[r]``.

    The row has ``num_computed_tokens[r]`` tokens before the step. The first ``num_decodes`` rows
    compute one token each, the one last sampled in the slot, which is on the device. ``tokens`` are
    the ids of the other rows, packed. A token is sampled for row ``r`` if ``needs_sampling[r]``.
    """

    id: int
    slots: list[int]
    starts: list[int]
    counts: list[int]
    decodes: int
    tokens: list[int]
    samples: list[bool]
    opened: list[SlotStart]
    closed: list[int]
    page_writes: list[PageWrite]
    held: bool = False
    """Whether sampling is deferred, because a row needs a bitmask or a logits processor:
    ``execute_model`` then stops before sampling, and ``sample_tokens`` completes the step."""


class StepEdits(msgspec.Struct, frozen=True, array_like=True):
    """Bitmasks for ``rows`` of a step with deferred sampling.

    ``bitmask`` has ``ceil(vocab_size / 32)`` little-endian int32 words per row. Bit ``i % 32`` of
    word ``i // 32`` is token id ``i``; 1 is allowed.
    """

    rows: list[int]
    masks: bytes


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the sampled token, then the most probable ones."""

    ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the sampled token, from 1."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The output of a step: a sampled token for each row with ``needs_sampling``, in order.

    ``logprobs`` and ``prompt_logprobs`` are by row, for rows that requested them.
    ``invalid_rows`` are indices into ``sampled_token_ids`` of rows with only NaN or masked logits.
    A failed step has ``error`` and no tokens.
    """

    id: int
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    bad: list[int] = []
    error: str | None = None
    faults: dict[int, str] = {}
    """Errors of logits processors, for rows in ``invalid_rows``."""
