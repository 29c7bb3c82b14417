"""The response of a text completion: complete, or as the chunks of its choices."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from treadle_server.completion_stream import EventBuffer
from treadle_server.context import ServerContext
from treadle_server.generation import Generation
from treadle_server.logprobs import TextLogprobs, prompt_logprobs
from treadle_server.wire.common import Usage
from treadle_server.wire.completions import Completion, CompletionChoice, CompletionRequest

__all__ = ("TextChoiceStream", "text_completion")


def text_completion(
    context: ServerContext, generation: Generation, outputs: Sequence[RequestOutput], usage: Usage
) -> Completion:
    """Return the answer to finished outputs, one for each prompt."""
    completion = new_completion(
        context,
        generation,
        [
            text_choice(
                context,
                generation,
                output,
                output_choice,
                number * (generation.num_best or generation.params.n) + rank,
            )
            for number, output in enumerate(outputs)
            for rank, output_choice in enumerate(best_of(output.outputs, generation.num_best))
        ],
    )
    completion.usage = usage
    return completion


def best_of(outputs: Sequence[CompletionOutput], count: int | None) -> Sequence[CompletionOutput]:
    """Return the ``count`` outputs with the most probable tokens, or all in their order."""
    if count is None:
        return outputs

    def mean_logprob(output: CompletionOutput) -> float:
        return (output.cumulative_logprob or 0.0) / max(len(output.token_ids), 1)

    return sorted(outputs, key=mean_logprob, reverse=True)[:count]


def new_completion(
    context: ServerContext, generation: Generation, choices: list[CompletionChoice]
) -> Completion:
    return Completion(
        id=generation.id,
        object="text_completion",
        created=generation.created_time,
        model=context.model,
        choices=choices,
        system_fingerprint=context.fingerprint,
    )


def request_of(generation: Generation) -> CompletionRequest:
    request = generation.request
    return request if isinstance(request, CompletionRequest) else CompletionRequest()


def new_logprobs(context: ServerContext, request: CompletionRequest) -> TextLogprobs | None:
    if request.logprobs is None:
        return None
    return TextLogprobs(context.engine.tokenizer, request.logprobs)


def text_choice(
    context: ServerContext,
    generation: Generation,
    output: RequestOutput,
    completion: CompletionOutput,
    index: int,
) -> CompletionChoice:
    request, text = request_of(generation), ""
    ids: list[int] = []
    positions: list[PositionLogprobs | None] = []
    if request.echo:
        text = echoed_prompt(context, generation, output)
        ids = list(output.prompt_token_ids)
        positions = list(output.prompt_logprobs or [None] * len(ids))
    if not generation.discard_output:
        text += completion.text
        ids += completion.token_ids
        positions += completion.logprobs or []
    logprobs = new_logprobs(context, request)
    choice = CompletionChoice(
        index=index,
        text=text,
        logprobs=None if logprobs is None else logprobs.take(ids, positions),
        finish_reason="length" if generation.discard_output else completion.finish_reason,
        stop_reason=None if generation.discard_output else completion.stop_reason,
    )
    if request.prompt_logprobs is not None:
        choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
    if request.return_token_ids:
        choice.token_ids = [] if generation.discard_output else completion.token_ids
        choice.prompt_token_ids = output.prompt_token_ids
    return choice


def echoed_prompt(context: ServerContext, generation: Generation, output: RequestOutput) -> str:
    """Return the prompt as text: the client's own, unless it sent ids or had them cut."""
    params = generation.params
    if output.prompt is not None and params.truncate_prompt_tokens is None:
        return output.prompt
    return context.engine.tokenizer.decode(
        output.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
    )


class TextChoiceStream:
    """One output of a streamed completion. Its chunk is one object, encoded again and again."""

    def __init__(
        self, context: ServerContext, generation: Generation, index: int, buffer: EventBuffer
    ) -> None:
        self._context = context
        self._generation = generation
        self._request = request_of(generation)
        self._buffer = buffer
        self._logprobs = new_logprobs(context, self._request)
        self._choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=None)
        self.chunk = new_completion(context, generation, [self._choice])

    @staticmethod
    def new_chunk(
        context: ServerContext, generation: Generation, choices: list[CompletionChoice]
    ) -> Completion:
        return new_completion(context, generation, choices)

    def open(self, output: RequestOutput, *, is_first: bool) -> None:
        """Send the requested data of the prompt, if there is any."""
        request, choice = self._request, self._choice
        if request.echo:
            choice.text = echoed_prompt(self._context, self._generation, output)
            if self._logprobs is not None:
                ids = output.prompt_token_ids
                positions = output.prompt_logprobs or [None] * len(ids)
                choice.logprobs = self._logprobs.take(ids, positions)
        if request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if request.return_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if choice.text or choice.prompt_logprobs or choice.prompt_token_ids:
            self._buffer.add(self.chunk)
            choice.text = ""
            choice.logprobs = choice.prompt_logprobs = choice.prompt_token_ids = None

    def write(self, completion: CompletionOutput) -> None:
        """Send what is new."""
        choice, discards = self._choice, self._generation.discard_output
        if completion.finish_reason is not None:
            choice.finish_reason = "length" if discards else completion.finish_reason
            choice.stop_reason = None if discards else completion.stop_reason
        if not discards:
            choice.text = completion.text
            if self._logprobs is not None:
                choice.logprobs = self._logprobs.take(
                    completion.token_ids, completion.logprobs or []
                )
            if self._request.return_token_ids:
                choice.token_ids = completion.token_ids
        has_tokens = choice.logprobs is not None and choice.logprobs.tokens
        if choice.text or has_tokens or choice.token_ids or choice.finish_reason is not None:
            self._buffer.add(self.chunk)
