"""``POST /v1/completions``."""

from __future__ import annotations

import msgspec

from treadle_server.wire.common import SamplingFields, Usage, WireLogprob

__all__ = ("Completion", "CompletionChoice", "CompletionLogprobs", "CompletionRequest")


class CompletionRequest(SamplingFields, kw_only=True):
    """``prompt`` is a text, ids, or a list of either (msgspec knows one list type in a union)."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists of equal length, one entry for each token of the text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, WireLogprob] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer, and one chunk of a streamed answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
