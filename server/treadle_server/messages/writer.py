"""The events of a message, and the message that they build up."""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.outputs import RequestOutput
from treadle_server.blocks import Block, BlockReader
from treadle_server.completion_stream import AnswerWriter
from treadle_server.context import ServerContext
from treadle_server.errors import APIError
from treadle_server.generation import Generation
from treadle_server.messages.answer import (
    AnswerBlock,
    AnthropicMessage,
    AnthropicUsage,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
)
from treadle_server.messages.errors import to_anthropic
from treadle_server.messages.prepare import MessageCall
from treadle_server.request_metrics import TokenUsageCounter
from treadle_server.wire.common import Usage

__all__ = ("MessageWriter",)

SIGNATURE = "unsigned"
"""The signature of every thought. Clients send it back, and nobody checks it."""


class MessageWriter(AnswerWriter):
    """Writes one message."""

    end = b""

    def __init__(self, context: ServerContext, call: MessageCall, id: str, request_id: str) -> None:
        super().__init__()
        self.parser_errors: list[str] = []
        self.message = AnthropicMessage(
            id=id,
            model=call.request.model or context.model,
            content=[],
            usage=AnthropicUsage(input_tokens=0, output_tokens=0),
        )
        self._context, self._call, self._request_id = context, call, request_id
        self._reader = BlockReader(hides_reasoning=not call.shows_thinking)
        self._is_ready = self._is_open = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def begin(self, generation: Generation) -> None:
        self._is_ready = True
        self.message.usage.input_tokens = len(generation.prompts[0].ids or ())

    def opening(self) -> bytes:
        if self._is_ready:
            self._open()
        return self.buffer.take()

    def keep_alive(self) -> bytes:
        if not self._is_open:
            return super().keep_alive() if not self._is_ready else self.opening()
        self._send("ping")
        return self.buffer.take()

    def write(self, number: int, output: RequestOutput, counter: TokenUsageCounter) -> None:
        if not self._is_open:
            self._set_input(len(output.prompt_token_ids), output.num_cached_tokens)
            self._open()
        for completion in output.outputs:
            if completion.parser_errors:
                self.parser_errors += completion.parser_errors
                self.buffer.comment(f"parser-error {','.join(completion.parser_errors)}")
            for event, block, piece in self._reader.read(completion):
                if event == "open":
                    self._start_block(block)
                elif event == "delta":
                    self._send("content_block_delta", index=block.index, delta=delta(block, piece))
                else:
                    self._stop_block(block)
            if completion.finish_reason is not None:
                self._finish_reason = completion.finish_reason
                self._stop_reason = completion.stop_reason

    def finish(self, usage: Usage) -> None:
        self._open()
        message = self.message
        self._set_input(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)
        message.usage.output_tokens = usage.completion_tokens
        message.stop_reason = self._reason(usage)
        if message.stop_reason == "stop_sequence":
            message.stop_sequence = str(self._stop_reason)
        stop = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        self._send("message_delta", delta=stop, usage=message.usage)
        self._send("message_stop")

    def error(self, error: APIError) -> bytes:
        self.buffer.add(to_anthropic(error, self._request_id), "error")
        return self.buffer.take()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._send("message_start", message=self.message)

    def _send(self, event: str, **fields: Any) -> None:
        self.buffer.add({"type": event, **fields}, event)

    def _set_input(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.message.usage.input_tokens = prompt_tokens - cached_tokens
        self.message.usage.cache_read_input_tokens = cached_tokens

    def _start_block(self, block: Block) -> None:
        empty: AnswerBlock
        if block.kind == "text":
            empty = TextAnswer(text="")
        elif block.kind == "reasoning":
            empty = ThinkingAnswer(thinking="", signature="")
        else:
            empty = ToolUseAnswer(id=block.id, name=block.name, input={})
        self.message.content.append(empty)
        self._send("content_block_start", index=block.index, content_block=empty)

    def _stop_block(self, block: Block) -> None:
        answer = self.message.content[block.index]
        match answer:
            case TextAnswer():
                answer.text = block.text
            case ThinkingAnswer():
                answer.thinking, answer.signature = block.text, SIGNATURE
                signature = {"type": "signature_delta", "signature": SIGNATURE}
                self._send("content_block_delta", index=block.index, delta=signature)
            case ToolUseAnswer():
                answer.input = arguments_of(block.text)
        self._send("content_block_stop", index=block.index)

    def _reason(self, usage: Usage) -> str:
        match self._finish_reason:
            case "tool_calls":
                return "tool_use"
            case "length":
                limit = self._call.request.max_tokens
                is_full = usage.total_tokens >= self._context.engine.info.max_model_len
                if is_full and (limit is None or usage.completion_tokens < limit):
                    return "model_context_window_exceeded"
                return "max_tokens"
            case "stop" if isinstance(self._stop_reason, str):
                return "stop_sequence"
        return "end_turn"


def delta(block: Block, piece: str) -> dict[str, str]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": piece}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": piece}
        case "call":
            return {"type": "input_json_delta", "partial_json": piece}


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call; what is no JSON object stands under its own key."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
