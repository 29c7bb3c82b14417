"""Messages between a frontend (text) and an engine core (token ids)."""

from __future__ import annotations

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import TokenLogprobs

__all__ = ("EngineRequest", "TokenOutput")


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate. A request with ``n`` outputs becomes ``n`` of these.

    ``id`` is unique in the engine and created by the frontend; it is not the client's id.
    ``prefix_leader`` is the id of the first of ``n`` sequences; the others share its prompt pages.
    ``bad_words`` are encoded; ``client`` is as in ``Prompt``. ``arrival_time`` is of ``time.monotonic``; logs use ``label``.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival_time: float
    index: int = 0
    prefix_leader: str | None = None
    bad_words: list[list[int]] = []
    client: str = ""
    label: str = ""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step added to a sequence.

    ``finish_reason`` is ``None``, ``stop``, ``length``, ``abort`` or ``error``. ``stop_reason`` is
    the matched stop token id, ``None`` for the EOS token. ``scheduled_time``, ``prompt_logprobs`` (without
    one for the first prompt token) and ``unenforced`` are in the first output. ``error`` may be shown to the client.
    ``param`` is set if a parameter caused it (a grammar that does not compile). The garbage
    collector ignores it: there is one for each token, and nothing in it can be part of a cycle.
    """

    id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0
    scheduled_time: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    param: str | None = None
    unenforced: str | None = None
