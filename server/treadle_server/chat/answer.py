"""The response of a chat completion: complete, or as the chunks of its choices."""

from __future__ import annotations

from treadle.outputs import (
    CompletionOutput,
    OutputPart,
    ReasoningPart,
    RequestOutput,
    TextPart,
    ToolCall,
)
from treadle_server.chat.custom_input import CustomInput
from treadle_server.chat.thinking import hides_reasoning
from treadle_server.chat.tools import custom_names
from treadle_server.completion_stream import EventBuffer
from treadle_server.context import ServerContext
from treadle_server.generation import Generation
from treadle_server.logprobs import chat_logprobs, prompt_logprobs
from treadle_server.wire.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    CustomToolCall,
    ToolCallChunk,
    ToolCallFunction,
)
from treadle_server.wire.common import Usage

__all__ = ("ChatChoiceStream", "chat_completion")


class ChatFields:
    """The fields that all choices of one request share."""

    def __init__(self, context: ServerContext, generation: Generation) -> None:
        request = generation.request
        chat = request if isinstance(request, ChatRequest) else ChatRequest(messages=[])
        self._tokenizer = context.engine.tokenizer
        self.wants_logprobs = bool(chat.logprobs)
        self.wants_ids = bool(chat.return_token_ids)
        self.wants_reasoning = not hides_reasoning(chat)
        self.custom_tools = custom_names(chat)
        self.is_legacy = chat.functions is not None
        self._num_top_logprobs = chat.top_logprobs or 0

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        is_call = self.is_legacy and completion.finish_reason == "tool_calls"
        return "function_call" if is_call else completion.finish_reason

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.wants_logprobs or completion.logprobs is None:
            return None
        return chat_logprobs(
            completion.token_ids, completion.logprobs, self._num_top_logprobs, self._tokenizer
        )


def chat_completion(
    context: ServerContext, generation: Generation, output: RequestOutput, usage: Usage
) -> ChatCompletion:
    """Return the answer to a finished output."""
    fields = ChatFields(context, generation)
    return ChatCompletion(
        id=generation.id,
        object="chat.completion",
        created=generation.created_time,
        model=context.model,
        choices=[
            ChatChoice(
                index=completion.index,
                message=chat_message(completion, fields),
                logprobs=fields.logprobs(completion),
                finish_reason=fields.finish_reason(completion),
                stop_reason=completion.stop_reason,
                token_ids=completion.token_ids if fields.wants_ids else None,
            )
            for completion in output.outputs
        ],
        usage=usage,
        system_fingerprint=context.fingerprint,
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if fields.wants_ids else None,
    )


def chat_message(completion: CompletionOutput, fields: ChatFields) -> ChatMessage:
    calls = [
        whole_call(call, fields) for call in sorted(completion.tool_calls, key=lambda c: c.index)
    ]
    reasoning = completion.reasoning if fields.wants_reasoning else None
    return ChatMessage(
        role="assistant",
        content=None if calls and not completion.content else completion.content,
        refusal=None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=None if fields.is_legacy else calls or None,
        function_call=calls[0].function if fields.is_legacy and calls else None,
    )


def whole_call(call: ToolCall, fields: ChatFields) -> ToolCallChunk:
    if call.name in fields.custom_tools:
        reader = CustomInput()
        custom = CustomToolCall(name=call.name, input=reader.feed(call.arguments) + reader.finish())
        return ToolCallChunk(id=call.id, type="custom", custom=custom)
    function = ToolCallFunction(name=call.name, arguments=call.arguments)
    return ToolCallChunk(id=call.id, type="function", function=function)


class ChatChoiceStream:
    """One of the ``n`` outputs of a streamed chat.

    For each: a chunk with the role, chunks with what is new, a chunk with the finish reason. The
    chunk is one object, changed and encoded again and again.
    """

    def __init__(
        self, context: ServerContext, generation: Generation, index: int, buffer: EventBuffer
    ) -> None:
        self._buffer = buffer
        self._fields = ChatFields(context, generation)
        self._logprobs: ChatLogprobs | None = None
        self._ids: list[int] | None = None
        self._inputs: dict[int, CustomInput] = {}
        self._delta = ChatDelta()
        self._choice = ChatChunkChoice(
            index=index, delta=self._delta, logprobs=None, finish_reason=None
        )
        self.chunk = self.new_chunk(context, generation, [self._choice])

    @staticmethod
    def new_chunk(
        context: ServerContext, generation: Generation, choices: list[ChatChunkChoice]
    ) -> ChatChunk:
        return ChatChunk(
            id=generation.id,
            object="chat.completion.chunk",
            created=generation.created_time,
            model=context.model,
            choices=choices,
            system_fingerprint=context.fingerprint,
        )

    def open(self, output: RequestOutput, *, is_first: bool) -> None:
        """Send the role; the first chunk of a response also has the requested data of the prompt."""
        if is_first:
            self.chunk.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
            if self._fields.wants_ids:
                self.chunk.prompt_token_ids = output.prompt_token_ids
        self._send(ChatDelta(role="assistant", content=""))
        self.chunk.prompt_logprobs = self.chunk.prompt_token_ids = None

    def write(self, completion: CompletionOutput) -> None:
        """Send what is new."""
        self._collect(completion)
        if completion.parser_errors:
            self._buffer.comment(f"parser-error {','.join(completion.parser_errors)}")
        if completion.parts is not None:
            for part in completion.parts:
                self._write_part(part)
        elif completion.text or self._logprobs is not None or self._ids:
            # Logprobs and ids of pending text still go out with the token they belong to.
            self._delta.content = completion.text
            self._send_with_tokens(self._delta)
        if completion.finish_reason is not None:
            self._finish_calls()
            self._choice.finish_reason = self._fields.finish_reason(completion)
            self._choice.stop_reason = completion.stop_reason
            self._send_with_tokens(ChatDelta())

    def _write_part(self, part: OutputPart) -> None:
        if isinstance(part, TextPart):
            self._send_with_tokens(ChatDelta(content=part.text))
        elif isinstance(part, ReasoningPart):
            if self._fields.wants_reasoning:
                delta = ChatDelta(reasoning=part.text, reasoning_content=part.text)
                self._send_with_tokens(delta)
        else:
            self._send_with_tokens(self._call_delta(part))

    def _call_delta(self, part: ToolCall) -> ChatDelta:
        """Return the next piece of a call, which has the name if it is the first."""
        if part.name in self._fields.custom_tools:
            self._inputs[part.index] = CustomInput()
        reader = self._inputs.get(part.index)
        if reader is not None:
            custom = CustomToolCall(name=part.name, input=reader.feed(part.arguments))
            kind = "custom" if part.id is not None else None
            chunk = ToolCallChunk(index=part.index, id=part.id, type=kind, custom=custom)
            return ChatDelta(tool_calls=[chunk])
        function = ToolCallFunction(name=part.name, arguments=part.arguments)
        if self._fields.is_legacy:
            return ChatDelta(function_call=function)
        kind = "function" if part.id is not None else None
        chunk = ToolCallChunk(index=part.index, id=part.id, type=kind, function=function)
        return ChatDelta(tool_calls=[chunk])

    def _finish_calls(self) -> None:
        """Send the inputs of custom tools that were not of the expected form."""
        for index, reader in self._inputs.items():
            if rest := reader.finish():
                chunk = ToolCallChunk(index=index, custom=CustomToolCall(input=rest))
                self._send(ChatDelta(tool_calls=[chunk]))

    def _collect(self, completion: CompletionOutput) -> None:
        """Keep logprobs and ids until the next chunk is sent."""
        if self._fields.wants_logprobs and completion.logprobs:
            logprobs = self._fields.logprobs(completion)
            if self._logprobs is None or logprobs is None:
                self._logprobs = logprobs
            else:
                self._logprobs.content += logprobs.content
        if self._fields.wants_ids:
            self._ids = (self._ids or []) + completion.token_ids

    def _send_with_tokens(self, delta: ChatDelta) -> None:
        self._choice.logprobs, self._choice.token_ids = self._logprobs, self._ids
        self._logprobs = self._ids = None
        self._send(delta)
        self._choice.logprobs = self._choice.token_ids = None

    def _send(self, delta: ChatDelta) -> None:
        self._choice.delta = delta
        self._buffer.add(self.chunk)
