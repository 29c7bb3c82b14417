"""The whole answer of a text completion."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from treadle_server.completions.prepare import Job
from treadle_server.context import Context
from treadle_server.logprobs import TextLogprobs, prompt_logprobs
from treadle_server.pace import usage_of
from treadle_server.wire.common import Usage
from treadle_server.wire.completions import Completion, CompletionChoice, CompletionLogprobs

__all__ = ("answer", "echoed", "silenced")


def answer(context: Context, job: Job, outputs: Sequence[RequestOutput]) -> Completion:
    """The answer to finished outputs, one for each prompt."""
    choices = [
        choice(context, job, output, one, number * job.params.n + one.index)
        for number, output in enumerate(outputs)
        for one in sorted(output.outputs, key=lambda o: o.index)
    ]
    usage = usage_of(outputs)
    return Completion(
        id=job.id,
        object="text_completion",
        created=job.created,
        model=context.model,
        choices=choices,
        usage=silenced(usage) if job.silent else usage,
        system_fingerprint=context.fingerprint,
    )


def silenced(usage: Usage) -> Usage:
    """Without the token that the client did not ask for."""
    usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
    return usage


def choice(
    context: Context, job: Job, output: RequestOutput, one: CompletionOutput, index: int
) -> CompletionChoice:
    request, text = job.request, ""
    ids: list[int] = []
    positions: list[PositionLogprobs | None] = []
    if request.echo:
        text = echoed(context, job, output)
        ids = list(output.prompt_token_ids)
        positions = list(output.prompt_logprobs or [None] * len(ids))
    if not job.silent:
        text += one.text
        ids += one.token_ids
        positions += one.logprobs or []
    logprobs: CompletionLogprobs | None = None
    if request.logprobs is not None:
        logprobs = TextLogprobs(context.engine.tokenizer, request.logprobs).take(ids, positions)
    with_ids = bool(request.return_token_ids)
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason="length" if job.silent else one.finish_reason,
        stop_reason=None if job.silent else one.stop_reason,
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs)
        if request.prompt_logprobs is not None
        else None,
        token_ids=([] if job.silent else one.token_ids) if with_ids else None,
        prompt_token_ids=output.prompt_token_ids if with_ids else None,
    )


def echoed(context: Context, job: Job, output: RequestOutput) -> str:
    """The prompt as text: the client's own, unless it sent ids or had them cut."""
    if output.prompt is not None and job.params.truncate_prompt_tokens is None:
        return output.prompt
    return context.engine.tokenizer.decode(
        output.prompt_token_ids, skip_special_tokens=job.params.skip_special_tokens
    )
