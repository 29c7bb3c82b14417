"""From a completion request to prompts and sampling parameters."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.errors import ContextLengthError, RequestError
from treadle.text.input_processor import CHARS_PER_TOKEN
from treadle_server.context import Context
from treadle_server.engine import Prompt
from treadle_server.sampling import MAX_SEQUENCES, to_params
from treadle_server.wire.completions import CompletionRequest

__all__ = ("Job", "prepare", "prompts_of")


class Job(msgspec.Struct, kw_only=True):
    """A completion request, ready for the engine.

    With ``silent`` the one token that the engine must make is thrown away: the client asked for
    ``max_tokens`` 0, to see its prompt scored.
    """

    id: str
    created: int
    request: CompletionRequest
    prompts: list[Any]
    params: SamplingParams
    silent: bool


async def prepare(context: Context, request: CompletionRequest) -> Job:
    """Check and convert. Raises ``RequestError`` or ``APIError``."""
    context.check_model(request.model)
    texts = prompts_of(request.prompt)
    if (count := len(texts) * (request.n or 1)) > MAX_SEQUENCES:
        raise RequestError(
            f"{len(texts)} prompts with n {request.n or 1} are {count} sequences; at most "
            f"{MAX_SEQUENCES} are allowed in one request",
            param="prompt",
        )
    changes: dict[str, Any] = {}
    silent = request.max_tokens == 0
    if silent:
        if not request.echo:
            raise RequestError(
                "max_tokens is 0; it must be at least 1 unless echo is true", param="max_tokens"
            )
        changes["max_tokens"] = 1
    if request.logprobs is not None:
        changes["logprobs"] = request.logprobs
        if request.echo:
            changes["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    params = to_params(request, context.defaults, context.engine.facts.max_model_len, **changes)
    return Job(
        id=context.new_id("cmpl"),
        created=int(time.time()),
        request=request,
        prompts=[await encoded(context, request, text) for text in texts],
        params=context.granted(params),
        silent=silent,
    )


def prompts_of(prompt: str | list[Any] | None) -> list[str | list[int]]:
    """One entry for each prompt. Raises ``RequestError`` for an empty or a mixed list."""
    if prompt is None:
        raise RequestError("prompt is missing; send text or token ids", param="prompt")
    found: list[str | list[int]]
    if isinstance(prompt, str):
        found = [prompt]
    elif all(isinstance(p, int) for p in prompt):
        found = [[*prompt]]
    elif all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) for p in prompt):
        found = [*prompt]
    else:
        raise RequestError(
            "prompt mixes texts, ids and lists; send one text, one list of ids, or a list of "
            "either kind",
            param="prompt",
        )
    for text in found:
        if len(text) == 0:
            raise RequestError("prompt is empty; send at least one token", param="prompt")
    return found


async def encoded(context: Context, request: CompletionRequest, text: str | list[int]) -> Prompt:
    """What the engine takes. It encodes text itself, unless special tokens are to be left out."""
    if not isinstance(text, str):
        return {"prompt_token_ids": text}
    if request.add_special_tokens is not False:
        return text
    tokenizer, most = context.engine.tokenizer, context.engine.facts.max_model_len * CHARS_PER_TOKEN
    if len(text) > most:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters; this model's context holds at most {most}: "
            "send less",
            param="prompt",
        )
    ids = await context.off_loop(
        len(text), lambda: tokenizer.encode(text, add_special_tokens=False)
    )
    if not ids:
        raise RequestError("prompt is empty; send at least one token", param="prompt")
    return {"prompt_token_ids": ids, "prompt": text}
