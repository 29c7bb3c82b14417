"""The events of a response, and the response that they build up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from treadle.outputs import CompletionOutput, RequestOutput
from treadle_server.blocks import Block, BlockReader
from treadle_server.chat.custom_input import CustomInput
from treadle_server.chat.thinking import hides_reasoning
from treadle_server.completion_stream import AnswerWriter
from treadle_server.context import ServerContext
from treadle_server.errors import APIError
from treadle_server.generation import Generation
from treadle_server.logprobs import chat_logprobs
from treadle_server.request_metrics import TokenUsageCounter
from treadle_server.responses.answer import (
    CallItem,
    CustomCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
)
from treadle_server.responses.prepare import ResponseCall
from treadle_server.responses.tools import echoed_tools
from treadle_server.wire.chat import ChatTokenLogprob
from treadle_server.wire.common import Usage

__all__ = ("ResponseWriter",)

Keep = Callable[[Response], bool]


class ResponseWriter(AnswerWriter):
    """Writes one response. ``keep`` stores it when it is complete, and tells whether it did."""

    end = b""

    def __init__(self, context: ServerContext, call: ResponseCall, keep: Keep) -> None:
        super().__init__()
        self.response = new_response(context, call)
        self.parser_errors: list[str] = []
        self._context, self._call, self._keep = context, call, keep
        self._reader = BlockReader(hides_reasoning=hides_reasoning(call.chat))
        self._num_events = 0
        self._is_ready = self._is_open = False
        self._finish_reason: str | None = None
        self._input: CustomInput | None = None
        self._logprobs: list[ChatTokenLogprob] = []
        """Those of the text that is open."""
        self._new_logprobs: list[ChatTokenLogprob] = []

    # -- the stream --------------------------------------------------------------------

    def begin(self, generation: Generation) -> None:
        self._is_ready = True

    def opening(self) -> bytes:
        if self._is_ready:
            self._open()
        return self.buffer.take()

    def keep_alive(self) -> bytes:
        """Repeat ``response.in_progress``: to some clients a comment is no sign of life."""
        if not self._is_open:
            return super().keep_alive() if not self._is_ready else self.opening()
        self._send("response.in_progress", response=self.response)
        return self.buffer.take()

    def write(self, number: int, output: RequestOutput, counter: TokenUsageCounter) -> None:
        self._open()
        for completion in output.outputs:
            if completion.parser_errors:
                self.parser_errors += completion.parser_errors
                self.buffer.comment(f"parser-error {','.join(completion.parser_errors)}")
            self._new_logprobs += self._logprobs_of(completion)
            for event, block, piece in self._reader.read(completion):
                if event == "open":
                    self._add_item(block)
                elif event == "delta":
                    logprobs, self._new_logprobs = self._new_logprobs, []
                    self._write_delta(block, piece, logprobs)
                else:
                    self._close_item(block)
            self._finish_reason = completion.finish_reason or self._finish_reason

    def finish(self, usage: Usage) -> None:
        self._open()
        response = self.response
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )
        if self._finish_reason == "length":
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
            if response.output:
                response.output[-1].status = "incomplete"
        else:
            response.status, response.completed_at = "completed", int(time.time())
        response.store = response.store and self._keep(response)
        self._send(f"response.{response.status}", response=response)

    def error(self, error: APIError) -> bytes:
        self._open()
        detail = error.detail
        self.response.status = "failed"
        self.response.error = ResponseError(
            code=detail.code or "server_error", message=detail.message
        )
        self._send("response.failed", response=self.response)
        return self.buffer.take()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._send("response.created", response=self.response)
            self._send("response.in_progress", response=self.response)

    def _send(self, event: str, **fields: Any) -> None:
        self.buffer.add({"type": event, "sequence_number": self._num_events, **fields}, event)
        self._num_events += 1

    # -- its items ---------------------------------------------------------------------

    def _add_item(self, block: Block) -> None:
        item = self._new_item(block)
        self.response.output.append(item)
        self._send("response.output_item.added", output_index=block.index, item=item)
        if isinstance(item, MessageItem):
            self._logprobs = []
            self._send_part("added", block, item.id, OutputText(text=""))
        elif isinstance(item, ReasoningItem):
            self._send_part("added", block, item.id, ReasoningText(text=""))

    def _new_item(self, block: Block) -> OutputItem:
        if block.kind == "text":
            return MessageItem(id=new_id("msg"), status="in_progress", content=[])
        if block.kind == "reasoning":
            return ReasoningItem(id=new_id("rs"), status="in_progress", content=[])
        tool = self._call.tools.of(block.name)
        self._input = CustomInput() if tool.is_custom else None
        fields: dict[str, Any] = {
            "status": "in_progress",
            "call_id": block.id,
            "name": tool.name,
            "namespace": tool.namespace,
        }
        if tool.is_custom:
            return CustomCallItem(id=new_id("ctc"), input="", **fields)
        return CallItem(id=new_id("fc"), arguments="", **fields)

    def _write_delta(self, block: Block, piece: str, logprobs: list[ChatTokenLogprob]) -> None:
        item, place = self.response.output[block.index], self._place(block)
        match item:
            case MessageItem():
                self._logprobs += logprobs
                place |= {"content_index": 0, "delta": piece, "logprobs": logprobs}
                self._send("response.output_text.delta", **place)
            case ReasoningItem():
                place |= {"content_index": 0, "delta": piece}
                self._send("response.reasoning_text.delta", **place)
            case CustomCallItem():
                if self._input is not None and (text := self._input.feed(piece)):
                    item.input += text
                    self._send("response.custom_tool_call_input.delta", delta=text, **place)
            case CallItem():
                self._send("response.function_call_arguments.delta", delta=piece, **place)

    def _close_item(self, block: Block) -> None:
        item, place = self.response.output[block.index], self._place(block)
        item.status = "completed"
        text = block.text
        match item:
            case MessageItem():
                item.content = [OutputText(text=text, logprobs=self._logprobs)]
                place |= {"content_index": 0, "text": text, "logprobs": self._logprobs}
                self._send("response.output_text.done", **place)
                self._send_part("done", block, item.id, item.content[0])
            case ReasoningItem():
                item.content = [ReasoningText(text=text)]
                self._send("response.reasoning_text.done", content_index=0, text=text, **place)
                self._send_part("done", block, item.id, item.content[0])
            case CustomCallItem():
                if self._input is not None and (rest := self._input.finish()):
                    item.input += rest
                    self._send("response.custom_tool_call_input.delta", delta=rest, **place)
                self._send("response.custom_tool_call_input.done", input=item.input, **place)
            case CallItem():
                item.arguments = text
                self._send(
                    "response.function_call_arguments.done",
                    name=item.name,
                    arguments=text,
                    **place,
                )
        self._send("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self.response.output[block.index].id, "output_index": block.index}

    def _send_part(
        self, state: str, block: Block, item_id: str, part: OutputText | ReasoningText
    ) -> None:
        self._send(
            f"response.content_part.{state}",
            item_id=item_id,
            output_index=block.index,
            content_index=0,
            part=part,
        )

    def _logprobs_of(self, completion: CompletionOutput) -> list[ChatTokenLogprob]:
        chat = self._call.chat
        if not chat.logprobs or not completion.logprobs:
            return []
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs,
            chat.top_logprobs or 0,
            self._context.engine.tokenizer,
        ).content


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def new_response(context: ServerContext, call: ResponseCall) -> Response:
    """Return a response without output, with the fields of the request as they were sent."""
    request = call.request
    reasoning = request.reasoning
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=request.model or context.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning={
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        store=request.store is not False,
        temperature=request.temperature,
        text=msgspec.to_builtins(request.text) if request.text else {"format": {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=echoed_tools(request.tools or ()),
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        user=request.user,
    )
