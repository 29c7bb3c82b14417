"""The whole answer of a chat completion."""

from __future__ import annotations

from treadle.api.parsers import ReasoningDelta, TextDelta
from treadle.outputs import CompletionOutput, RequestOutput
from treadle_server.chat.prepare import Chat
from treadle_server.context import Context
from treadle_server.logprobs import chat_logprobs, prompt_logprobs
from treadle_server.pace import usage_of
from treadle_server.parsing import WatchedSplitter
from treadle_server.wire.chat import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ToolCallChunk,
    ToolCallFunction,
)

__all__ = ("answer", "finish_reason")


async def answer(
    context: Context, chat: Chat, output: RequestOutput
) -> tuple[ChatCompletion, list[str]]:
    """The answer, and the names of parsers that failed on it."""
    choices, failed = [], []
    for one in sorted(output.outputs, key=lambda o: o.index):
        splitter = chat.splitter(context)
        choices.append(await choice(context, chat, one, splitter))
        if splitter is not None:
            failed += splitter.failed
    ids = chat.request.return_token_ids
    completion = ChatCompletion(
        id=chat.id,
        object="chat.completion",
        created=chat.created,
        model=context.model,
        choices=choices,
        usage=usage_of([output]),
        system_fingerprint=context.fingerprint,
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if ids else None,
    )
    return completion, failed


async def choice(
    context: Context, chat: Chat, one: CompletionOutput, splitter: WatchedSplitter | None
) -> ChatChoice:
    logprobs = None
    if chat.request.logprobs and one.logprobs is not None:
        logprobs = chat_logprobs(
            one.token_ids, one.logprobs, chat.top_logprobs, context.engine.tokenizer
        )
    return ChatChoice(
        index=one.index,
        message=await message(chat, one, splitter),
        logprobs=logprobs,
        finish_reason=finish_reason(one.finish_reason, splitter),
        stop_reason=one.stop_reason,
        token_ids=one.token_ids if chat.request.return_token_ids else None,
    )


async def message(
    chat: Chat, one: CompletionOutput, splitter: WatchedSplitter | None
) -> ChatMessage:
    if splitter is None:
        return ChatMessage(role="assistant", content=one.text, refusal=None)
    said: list[str] = []
    thought: list[str] = []
    calls: dict[int, ToolCallChunk] = {}
    for delta in await splitter.split(one.text, one.token_ids, last=True):
        if isinstance(delta, TextDelta):
            said.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            thought.append(delta.text)
        else:
            call = calls.get(delta.index)
            if call is None:
                function = ToolCallFunction(name=delta.name or "", arguments="")
                call = calls[delta.index] = ToolCallChunk(
                    id=splitter.ids[delta.index], type="function", function=function
                )
            call.function.arguments += delta.arguments
    content: str | None = "".join(said)
    if calls and not content:
        content = None
    shown = thought and chat.request.include_reasoning is not False
    reasoning = "".join(thought) if shown else None
    return ChatMessage(
        role="assistant",
        content=content,
        refusal=None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=[calls[i] for i in sorted(calls)] or None,
    )


def finish_reason(reason: str | None, splitter: WatchedSplitter | None) -> str | None:
    called = splitter is not None and splitter.called
    return "tool_calls" if called and reason == "stop" else reason
