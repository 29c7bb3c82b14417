"""What the scheduler tells the executor and what comes back: the only data on a step's path.

All of it is msgspec Structs of ints and lists, so that the same values travel to workers in other
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
    """Layers that share page tables: ``pages`` of ``page_bytes`` each (all layers, keys and values).

    ``window`` is the number of tokens that the layers look back, itself included; ``None`` is all.
    """

    kind: str
    window: int | None
    pages: int
    layers: int
    page_bytes: int


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the frontend and the scheduler must know of a started executor."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    page_size: int
    groups: list[CacheGroup]
    depth: int
    """Steps that may be launched before the oldest is collected, less one: 0 on a CPU."""
    eos_ids: list[int]
    attention: str = ""
    weights_bytes: int = 0
    report: list[str] = []
    stages: dict[str, float] = {}
    """Seconds of each stage of the start, in order."""


class SlotStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters a slot: everything the sampler keeps for it until it leaves.

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
    """``pages`` go into row ``slot`` of the page table of ``group``, from column ``first`` on."""

    group: int
    slot: int
    first: int
    pages: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: row ``r`` computes ``counts[r]`` tokens of ``slots[r]`` after ``starts[r]``.

    Rows ``[0, decodes)`` compute one token each, whose id the device holds (the one sampled last
    in that slot); ids of the other rows are ``tokens``, packed in row order. ``samples[r]`` tells
    whether row ``r`` ends in a new token.
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
    """Some sampled row needs the host (a grammar's mask, a logits processor): ``launch`` stops
    before sampling, and ``Executor.sample`` completes the step."""


class StepEdits(msgspec.Struct, frozen=True, array_like=True):
    """What the host adds to a held step: ``rows`` of the plan and their token bitmasks.

    ``masks`` holds one line of ``ceil(vocab_size / 32)`` little-endian int32 words for each row;
    bit ``i % 32`` of word ``i // 32`` is id ``i``, 1 is allowed.
    """

    rows: list[int]
    masks: bytes


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen id first, then the likeliest ids."""

    ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first id, from 1."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """``tokens[i]`` is the id sampled for the i-th row of the plan that samples.

    ``logprobs`` and ``prompt_logprobs`` hold entries only for rows (by row index) that asked.
    ``bad`` lists the sampled rows (by index into ``tokens``) whose logits allowed no token at all.
    A failed step has ``error`` and no tokens.
    """

    id: int
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    bad: list[int] = []
    error: str | None = None
    faults: dict[int, str] = {}
    """What a logits processor raised for rows in ``bad``, which is then not the logits' fault."""
