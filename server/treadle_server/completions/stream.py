"""The streamed answer of a text completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from treadle.outputs import CompletionOutput, RequestOutput
from treadle_server.completions.answer import echoed, silenced
from treadle_server.completions.prepare import Job
from treadle_server.context import Context
from treadle_server.logprobs import TextLogprobs, prompt_logprobs
from treadle_server.outputs import check, merged
from treadle_server.pace import Pace, Tally
from treadle_server.sse import EventBuffer
from treadle_server.wire.completions import Completion, CompletionChoice

__all__ = ("events",)


async def events(context: Context, job: Job) -> AsyncGenerator[bytes, None]:
    """Yield whole events, without the last ``[DONE]``."""
    request = job.request
    pace = Pace(context.metrics if context.config.enable_request_metrics else None)
    buffer, tally = EventBuffer(), Tally()
    choices: dict[int, ChoiceStream] = {}
    async with aclosing(merged(context.engine, job.prompts, job.params, job.id)) as turns:
        async for turn in turns:
            pace.tick()
            for number, output in turn:
                tally.add(number, output)
                usage = tally.usage if request.wants_running_usage else None
                for one in output.outputs:
                    index = number * job.params.n + one.index
                    choice = choices.get(index)
                    if choice is None:
                        choice = choices[index] = ChoiceStream(context, job, index, buffer)
                        choice.chunk.usage = usage
                        choice.open(output)
                    choice.chunk.usage = usage
                    choice.take(one)
            yield buffer.take()
    usage = silenced(tally.usage) if job.silent else tally.usage
    if request.wants_usage:
        last = new_chunk(context, job, [])
        last.usage = usage
        buffer.add(last)
        yield buffer.take()
    pace.end(usage)


def new_chunk(context: Context, job: Job, choices: list[CompletionChoice]) -> Completion:
    return Completion(
        id=job.id,
        object="text_completion",
        created=job.created,
        model=context.model,
        choices=choices,
        system_fingerprint=context.fingerprint,
    )


class ChoiceStream:
    """One output. Its chunk is one object, changed and encoded again and again."""

    def __init__(self, context: Context, job: Job, index: int, buffer: EventBuffer) -> None:
        self._context = context
        self._job = job
        self._buffer = buffer
        request = job.request
        self._logprobs = (
            None
            if request.logprobs is None
            else TextLogprobs(context.engine.tokenizer, request.logprobs)
        )
        self._choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=None)
        self.chunk = new_chunk(context, job, [self._choice])

    def open(self, output: RequestOutput) -> None:
        """Send what was asked of the prompt, if anything was."""
        request, choice = self._job.request, self._choice
        if request.echo:
            choice.text = echoed(self._context, self._job, output)
            if self._logprobs is not None:
                ids = output.prompt_token_ids
                choice.logprobs = self._logprobs.take(
                    ids, output.prompt_logprobs or [None] * len(ids)
                )
        if request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if request.return_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if choice.text or choice.prompt_logprobs or choice.prompt_token_ids:
            self._buffer.add(self.chunk)
            choice.text = ""
            choice.logprobs = choice.prompt_logprobs = choice.prompt_token_ids = None

    def take(self, one: CompletionOutput) -> None:
        """Send what is new. Raises if the engine has failed on this output."""
        choice = self._choice
        if one.finish_reason is not None:
            check(one)
            choice.finish_reason = "length" if self._job.silent else one.finish_reason
            choice.stop_reason = None if self._job.silent else one.stop_reason
        if not self._job.silent:
            choice.text = one.text
            if self._logprobs is not None:
                choice.logprobs = self._logprobs.take(one.token_ids, one.logprobs or [])
            if self._job.request.return_token_ids:
                choice.token_ids = one.token_ids
        wanted = choice.text or (choice.logprobs is not None and choice.logprobs.tokens)
        if wanted or choice.token_ids or choice.finish_reason is not None:
            self._buffer.add(self.chunk)
