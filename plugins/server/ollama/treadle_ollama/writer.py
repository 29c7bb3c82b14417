"""The lines of a streamed answer, and the answer that they build up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from treadle import CompletionOutput, RequestOutput
from treadle_ollama.answer import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatAnswer,
    GenerateAnswer,
    OllamaAnswer,
    timestamp,
)
from treadle_ollama.errors import error_form
from treadle_ollama.translate import Call
from treadle_server.surfaces import (
    AnswerWriter,
    APIError,
    Block,
    BlockReader,
    ChatTokenLogprob,
    Generation,
    LineBuffer,
    ServerContext,
    TokenUsageCounter,
    Usage,
    chat_logprobs,
)

__all__ = ("OllamaWriter", "loaded")

clock = time.perf_counter_ns


class Pieces:
    """Text, thoughts, calls and log probabilities: those of one line, or of the whole answer."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.thinking: list[str] = []
        self.calls: list[AnswerToolCall] = []
        self.logprobs: list[ChatTokenLogprob] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)

    def extend(self, other: Pieces) -> None:
        self.text += other.text
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs

    def answer(self, model: str, *, is_chat: bool) -> OllamaAnswer:
        text, thinking = "".join(self.text), "".join(self.thinking) or None
        shared: dict[str, Any] = {
            "model": model,
            "created_at": timestamp(),
            "done": False,
            "logprobs": self.logprobs or None,
        }
        if not is_chat:
            return GenerateAnswer(**shared, response=text, thinking=thinking)
        message = AnswerMessage(
            role="assistant", content=text, thinking=thinking, tool_calls=self.calls or None
        )
        return ChatAnswer(**shared, message=message)


class OllamaWriter(AnswerWriter):
    """Writes one answer. ``answer`` is the whole of it, once it is finished."""

    end = b""
    media_type = "application/x-ndjson"
    answer: OllamaAnswer

    def __init__(self, context: ServerContext, call: Call, *, is_chat: bool) -> None:
        super().__init__()
        self.buffer = LineBuffer()
        self.parser_errors: set[str] = set()
        self._context, self._call, self._is_chat = context, call, is_chat
        self._reader = BlockReader(hides_reasoning=call.hides_thinking)
        self._whole = Pieces()
        self._done_reason = "stop"
        self._arrival = self._start = self._first = clock()
        self._is_ready = False

    def begin(self, generation: Generation) -> None:
        self._is_ready = True
        self._start = clock()

    def keep_alive(self) -> bytes:
        """Return a line without a text: clients read each line as an object."""
        if self._is_ready:
            self.buffer.add(self._line(Pieces()))
        return self.buffer.take()

    def write(self, number: int, output: RequestOutput, counter: TokenUsageCounter) -> None:
        if self._first < self._start:
            self._first = clock()
        pieces = Pieces()
        for completion in output.outputs:
            self.parser_errors.update(completion.parser_errors)
            pieces.logprobs += self._logprobs(completion)
            for event, block, piece in self._reader.read(completion):
                self._take(pieces, event, block, piece)
            if completion.finish_reason == "length":
                self._done_reason = "length"
        self._whole.extend(pieces)
        if pieces:
            self.buffer.add(self._line(pieces))

    def finish(self, usage: Usage) -> None:
        now = clock()
        self.answer = finished(
            self._line(self._whole),
            done_reason=self._done_reason,
            total_duration=now - self._arrival,
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=max(self._first, self._start) - self._start,
            eval_count=usage.completion_tokens,
            eval_duration=now - max(self._first, self._start),
        )
        last = self._line(Pieces())
        names = set(OllamaAnswer.__struct_fields__) - {"logprobs"}
        self.buffer.add(finished(last, **{name: getattr(self.answer, name) for name in names}))

    def error(self, error: APIError) -> bytes:
        self.buffer.add(error_form(error, ""))
        return self.buffer.take()

    def _line(self, pieces: Pieces) -> OllamaAnswer:
        return pieces.answer(self._call.model, is_chat=self._is_chat)

    def _take(self, pieces: Pieces, event: str, block: Block, piece: str) -> None:
        if event == "delta" and block.kind == "text":
            pieces.text.append(piece)
        elif event == "delta" and block.kind == "reasoning":
            pieces.thinking.append(piece)
        elif event == "close" and block.kind == "call":
            function = AnswerFunction(
                index=len(self._whole.calls) + len(pieces.calls),
                name=block.name,
                arguments=arguments_of(block.text),
            )
            pieces.calls.append(AnswerToolCall(id=block.id, function=function))

    def _logprobs(self, completion: CompletionOutput) -> Sequence[ChatTokenLogprob]:
        top = self._call.num_top_logprobs
        if top is None:
            return ()
        tokenizer = self._context.engine.tokenizer
        ids, positions = completion.token_ids, completion.logprobs or []
        return chat_logprobs(ids, positions, top, tokenizer).content


def finished(line: OllamaAnswer, **fields: Any) -> OllamaAnswer:
    return msgspec.structs.replace(line, **{**fields, "done": True})


def loaded(call: Call, *, is_chat: bool) -> OllamaAnswer:
    """Return the answer to a request without a prompt: the model is there."""
    line = Pieces().answer(call.model, is_chat=is_chat)
    return finished(line, done_reason="load")


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call; what is no JSON object stands under its own key."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
