"""What a request produces."""

from __future__ import annotations

import msgspec

__all__ = ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput")


class Logprob(msgspec.Struct, frozen=True):
    """Log probability of one id at one position. ``rank`` is 1 for the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the ``n`` outputs of a request.

    ``finish_reason`` is ``stop``, ``length``, ``abort`` or ``error``; ``None`` while it runs.
    ``stop_reason`` is the stop string or stop id that ended it, ``None`` for the end-of-sequence id.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """With the reason ``error``: what went wrong, in words that may be shown to a client."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of one request, in seconds on one monotonic clock."""

    arrival: float = 0.0
    first_token: float | None = None
    last_token: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request and its outputs so far.

    With ``output_kind="delta"`` texts, ids and logprobs hold only what is new; otherwise all.
    ``num_cached_tokens`` counts the prompt tokens that were taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
