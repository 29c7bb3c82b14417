"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from treadle_server.wire.common import SamplingFields, Usage, WireLogprob

__all__ = ("Completion", "CompletionChoice", "CompletionLogprobs", "CompletionRequest")


class CompletionRequest(SamplingFields, kw_only=True):
    """``prompt`` is a text, ids, or a list of either (msgspec knows one list type in a union)."""

    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        Meta(description="A text, token ids, or a list of either."),
    ] = None
    suffix: Annotated[
        str | None, Meta(description="Write what stands between the prompt and this text.")
    ] = None
    echo: Annotated[bool | None, Meta(description="Begin the text with the prompt.")] = None
    logprobs: Annotated[
        int | None, Meta(description="Log probabilities of this many alternatives for each token.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="false leaves out the tokens that the tokenizer puts around a text."),
    ] = None


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
