"""The outputs of a request."""

from __future__ import annotations

import msgspec

__all__ = ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput")


class Logprob(msgspec.Struct, frozen=True):
    """Log probability of a token at one position. ``rank`` is 1 for the most probable token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the ``n`` outputs of a request.

    ``finish_reason`` is ``stop``, ``length``, ``abort`` or ``error``; ``None`` if not finished.
    ``stop_reason`` is the matched stop string or stop token id; ``None`` if the EOS token or
    something else ended the output.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """If ``finish_reason`` is ``error``: a message that may be shown to the client."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of a request, in seconds of a monotonic clock."""

    arrival: float = 0.0
    first_token: float | None = None
    last_token: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request and its outputs so far.

    If ``output_kind`` is ``"delta"``, texts, ids and logprobs contain only what is new since the
    previous output. ``num_cached_tokens`` counts the prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
