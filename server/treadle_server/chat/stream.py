"""The streamed answer of a chat completion.

For each output: a chunk with the role, chunks with what is new, a chunk with the finish reason.
All chunks of one turn of the engine leave in one write.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from treadle.api.parsers import Delta, ReasoningDelta, TextDelta
from treadle.outputs import CompletionOutput, RequestOutput
from treadle_server.chat.answer import finish_reason
from treadle_server.chat.prepare import Chat
from treadle_server.context import Context
from treadle_server.logprobs import chat_logprobs, prompt_logprobs
from treadle_server.outputs import check, merged
from treadle_server.pace import Pace, Tally
from treadle_server.sse import EventBuffer
from treadle_server.wire.chat import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ToolCallChunk,
    ToolCallFunction,
)

__all__ = ("events",)


async def events(context: Context, chat: Chat) -> AsyncGenerator[bytes, None]:
    """Yield whole events, without the last ``[DONE]``."""
    request = chat.request
    pace = Pace(context.metrics if context.config.enable_request_metrics else None)
    buffer, tally = EventBuffer(), Tally()
    choices: dict[int, ChoiceStream] = {}
    first = True
    prompt = {"prompt_token_ids": chat.ids}
    async with aclosing(merged(context.engine, [prompt], chat.params, chat.id)) as turns:
        async for turn in turns:
            pace.tick()
            for _, output in turn:
                tally.add(0, output)
                usage = tally.usage if request.wants_running_usage else None
                for one in output.outputs:
                    choice = choices.get(one.index)
                    if choice is None:
                        choice = choices[one.index] = ChoiceStream(context, chat, one.index, buffer)
                        choice.chunk.usage = usage
                        choice.open(output if first else None)
                        first = False
                    choice.chunk.usage = usage
                    await choice.take(one)
            yield buffer.take()
    if request.wants_usage:
        last = new_chunk(context, chat, [])
        last.usage = tally.usage
        buffer.add(last)
        yield buffer.take()
    pace.end(tally.usage)


def new_chunk(context: Context, chat: Chat, choices: list[ChatChunkChoice]) -> ChatChunk:
    return ChatChunk(
        id=chat.id,
        object="chat.completion.chunk",
        created=chat.created,
        model=context.model,
        choices=choices,
        system_fingerprint=context.fingerprint,
    )


class ChoiceStream:
    """One of the ``n`` outputs. Its chunk is one object, changed and encoded again and again."""

    def __init__(self, context: Context, chat: Chat, index: int, buffer: EventBuffer) -> None:
        self._context = context
        self._chat = chat
        self._buffer = buffer
        self._splitter = chat.splitter(context)
        self._calls: set[int] = set()
        self._failures = 0
        self._logprobs: ChatLogprobs | None = None
        self._ids: list[int] | None = None
        self._plain = (
            self._splitter is None
            and not chat.request.logprobs
            and not chat.request.return_token_ids
        )
        self._delta = ChatDelta()
        self._choice = ChatChunkChoice(
            index=index, delta=self._delta, logprobs=None, finish_reason=None
        )
        self.chunk = new_chunk(context, chat, [self._choice])

    def open(self, output: RequestOutput | None) -> None:
        """Send the role; the first chunk of a response also tells what was asked of the prompt."""
        if output is not None:
            self.chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
            if self._chat.request.return_token_ids:
                self.chunk.prompt_token_ids = output.prompt_token_ids
        self._choice.delta = ChatDelta(role="assistant", content="")
        self._buffer.add(self.chunk)
        self._choice.delta = self._delta
        self.chunk.prompt_logprobs = self.chunk.prompt_token_ids = None

    async def take(self, one: CompletionOutput) -> None:
        """Send what is new. Raises if the engine has failed on this output."""
        if one.finish_reason is not None:
            check(one)
        if self._plain:
            if one.text:
                self._delta.content = one.text
                self._buffer.add(self.chunk)
        else:
            self._collect(one)
            self._send(await self._split(one))
        if one.finish_reason is not None:
            self._close(one)

    async def _split(self, one: CompletionOutput) -> list[Delta]:
        if self._splitter is None:
            # Logprobs and ids of held-back text still go out with the token they belong to.
            wanted = one.text or self._logprobs is not None or self._ids
            return [TextDelta(one.text)] if wanted else []
        deltas = await self._splitter.split(
            one.text, one.token_ids, last=one.finish_reason is not None
        )
        failed = self._splitter.failed
        if len(failed) > self._failures:
            self._failures = len(failed)
            self._buffer.comment(f"parser-error {','.join(failed)}")
        return deltas

    def _send(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            shown = self._shown(delta)
            if shown is not None:
                self._choice.delta = shown
                self._attach()
                self._buffer.add(self.chunk)
                self._choice.logprobs = self._choice.token_ids = None
        self._choice.delta = self._delta

    def _shown(self, delta: Delta) -> ChatDelta | None:
        if isinstance(delta, TextDelta):
            return ChatDelta(content=delta.text)
        if isinstance(delta, ReasoningDelta):
            if self._chat.request.include_reasoning is False:
                return None
            return ChatDelta(reasoning=delta.text, reasoning_content=delta.text)
        if delta.index in self._calls:
            piece = ToolCallChunk(
                index=delta.index, function=ToolCallFunction(arguments=delta.arguments)
            )
        else:
            self._calls.add(delta.index)
            piece = ToolCallChunk(
                index=delta.index,
                id=self._splitter.ids[delta.index] if self._splitter is not None else None,
                type="function",
                function=ToolCallFunction(name=delta.name or "", arguments=delta.arguments),
            )
        return ChatDelta(tool_calls=[piece])

    def _collect(self, one: CompletionOutput) -> None:
        """Keep logprobs and ids until a chunk takes them along."""
        if self._chat.request.logprobs and one.logprobs:
            found = chat_logprobs(
                one.token_ids, one.logprobs, self._chat.top_logprobs, self._context.engine.tokenizer
            )
            if self._logprobs is None:
                self._logprobs = found
            else:
                self._logprobs.content += found.content
        if self._chat.request.return_token_ids:
            self._ids = (self._ids or []) + one.token_ids

    def _attach(self) -> None:
        self._choice.logprobs, self._choice.token_ids = self._logprobs, self._ids
        self._logprobs = self._ids = None

    def _close(self, one: CompletionOutput) -> None:
        self._choice.delta = ChatDelta()
        self._attach()
        self._choice.finish_reason = finish_reason(one.finish_reason, self._splitter)
        self._choice.stop_reason = one.stop_reason
        self._buffer.add(self.chunk)
