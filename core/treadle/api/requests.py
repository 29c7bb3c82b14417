"""What crosses between a frontend (text) and an engine core (token ids), in one process or two."""

from __future__ import annotations

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import TokenLogprobs
from treadle.errors import RequestError

__all__ = ("EngineRequest", "TokenOutput", "refusal")


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate. A request with ``n`` outputs becomes ``n`` of these.

    ``id`` is unique in the engine and made by the frontend, never the client's own id. ``leader``
    is the id of the first of ``n`` siblings, whose prompt pages the others share. ``bad_words``
    are the params' bad words as token ids. ``arrival`` is in seconds on ``time.monotonic``.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float
    index: int = 0
    leader: str | None = None
    bad_words: list[list[int]] = []


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to a sequence.

    ``finish_reason`` is ``None``, ``stop``, ``length``, ``abort`` or ``error``; ``stop_reason`` is
    the stop id that ended it (``None`` for the end-of-sequence id). ``prompt_logprobs`` come once,
    one entry for each prompt token but the first. ``error`` is text that may be shown to a client;
    it is the client's fault if ``param`` names a parameter (a grammar that does not compile).
    """

    id: str
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    param: str | None = None


def refusal(output: TokenOutput) -> RequestError | None:
    """The error of a sequence that the engine took, and refuses now: its grammar is wrong."""
    if output.param is None:
        return None
    return RequestError(output.error or "the request was refused", param=output.param)
