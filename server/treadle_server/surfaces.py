"""What a plugin needs to serve another API with the one path from a request to its text.

A surface turns its request into a ``ChatRequest`` (or a ``CompletionRequest``), which ``prepare_chat``
checks and renders, and writes the outputs with an ``AnswerWriter``, whether the answer streams
(``stream``) or not (``write_all``, in ``until_disconnect``). Limits, keys, cancellation, usage, parsers and metrics are those of
the server. These names stay; other modules of ``treadle_server`` may change.
"""

from __future__ import annotations

from treadle_server.blocks import Block, BlockReader
from treadle_server.chat.prepare import prepare_chat
from treadle_server.completion_stream import AnswerWriter
from treadle_server.completions.fill_in import fill_in_prompt
from treadle_server.completions.prepare import prepare_completion
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.error_forms import set_error_form
from treadle_server.errors import APIError
from treadle_server.generation import Generation
from treadle_server.logprobs import chat_logprobs
from treadle_server.request_metrics import TokenUsageCounter
from treadle_server.routes.answers import answer, ignore_fields
from treadle_server.routes.generate import stream, until_disconnect, write_all
from treadle_server.sse import LineBuffer
from treadle_server.wire.chat import ChatRequest, ChatTokenLogprob
from treadle_server.wire.common import JSONSchema, ResponseFormat, Usage
from treadle_server.wire.completions import CompletionRequest
from treadle_server.wire.messages import (
    AssistantMessage,
    CalledFunction,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from treadle_server.wire.tools import ChatTool, ThinkingOptions

__all__ = (
    "APIError",
    "AnswerWriter",
    "AssistantMessage",
    "Block",
    "BlockReader",
    "CalledFunction",
    "ChatRequest",
    "ChatTokenLogprob",
    "ChatTool",
    "CompletionRequest",
    "Generation",
    "JSONSchema",
    "LineBuffer",
    "Message",
    "MessageToolCall",
    "ResponseFormat",
    "ServerContext",
    "SystemMessage",
    "ThinkingOptions",
    "TokenUsageCounter",
    "ToolMessage",
    "Usage",
    "UserMessage",
    "answer",
    "chat_logprobs",
    "fill_in_prompt",
    "ignore_fields",
    "prepare_chat",
    "prepare_completion",
    "request_body",
    "set_error_form",
    "stream",
    "until_disconnect",
    "write_all",
)
