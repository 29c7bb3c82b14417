"""From a completion request to prompts and sampling parameters."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from treadle.api.files import Tokenizer
from treadle.errors import RequestError
from treadle.text.prompts import Prompt
from treadle_server.completions.fill_in import fill_in_prompt
from treadle_server.context import ServerContext
from treadle_server.generation import Generation
from treadle_server.sampling import MAX_SEQUENCES
from treadle_server.wire.completions import CompletionRequest

__all__ = ("prepare_completion", "to_prompts")


async def prepare_completion(
    context: ServerContext, request: CompletionRequest, client: str
) -> Generation:
    """Check and convert a request of ``client``. Raises ``RequestError``."""
    context.check_model(request.model)
    prompts = to_prompts(request, client)
    if request.suffix:
        prompts = filled_in(prompts, request, context.engine.tokenizer)
    num_outputs = max(request.n or 1, request.best_of or 1)
    num_sequences = len(prompts) * num_outputs
    if num_sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts with n {num_outputs} are {num_sequences} sequences; at "
            f"most {MAX_SEQUENCES} are allowed in one request",
            param="prompt",
        )
    changes: dict[str, Any] = {}
    if request.max_tokens == 0:
        if not request.echo:
            raise RequestError(
                "max_tokens is 0; it must be at least 1 unless echo is true", param="max_tokens"
            )
        changes["max_tokens"] = 1
    if request.logprobs is not None:
        changes["logprobs"] = request.logprobs
        if request.echo:
            changes["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    chooses = (request.best_of or 1) > (request.n or 1) and not request.stream
    if chooses:  # the choice needs the probabilities of the outputs
        changes |= {"n": request.best_of, "logprobs": request.logprobs or 0}
    return Generation(
        id=context.new_id("cmpl"),
        created_time=int(time.time()),
        request=request,
        prompts=prompts,
        params=context.to_params(request, client, **changes),
        num_best=request.n or 1 if chooses else None,
        discard_output=request.max_tokens == 0,
    )


def filled_in(
    prompts: list[Prompt], request: CompletionRequest, tokenizer: Tokenizer
) -> list[Prompt]:
    """Return the prompts with the suffix. Raises ``RequestError``."""
    if request.echo or any(prompt.text is None for prompt in prompts):
        raise RequestError(
            "suffix goes with a prompt that is text, and not with echo", param="suffix"
        )
    return [
        msgspec.structs.replace(
            prompt, text=fill_in_prompt(prompt.text or "", request.suffix or "", tokenizer)
        )
        for prompt in prompts
    ]


def to_prompts(request: CompletionRequest, client: str) -> list[Prompt]:
    """Return one entry for each prompt. Raises ``RequestError`` for an empty or a mixed list."""
    prompt = request.prompt
    if prompt is None:
        raise RequestError("prompt is missing; send text or token ids", param="prompt")
    items: list[Any]
    if isinstance(prompt, str) or (prompt and all(isinstance(p, int) for p in prompt)):
        items = [prompt]
    elif all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) for p in prompt):
        items = [*prompt]
    else:
        raise RequestError(
            "prompt mixes texts, ids and lists; send one text, one list of ids, or a list of "
            "either kind",
            param="prompt",
        )
    if not items or not all(items):
        raise RequestError("prompt is empty; send at least one token", param="prompt")
    special = request.add_special_tokens is not False
    return [
        Prompt(text=item, add_special_tokens=special, client=client)
        if isinstance(item, str)
        else Prompt(ids=item, client=client)
        for item in items
    ]
