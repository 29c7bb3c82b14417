"""Running one line of a batch, by the functions that answer the same request over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from treadle.api.sampling_params import BOUNDS
from treadle.errors import EngineDeadError, QueueFullError, RequestError
from treadle_server.batches.slots import LineSlots
from treadle_server.batches.wire import BatchLine, LineFailure, LineOutput, LineResponse
from treadle_server.context import ServerContext
from treadle_server.decode import RequestDecoder
from treadle_server.errors import error_of
from treadle_server.responses.request import ResponsesRequest
from treadle_server.responses.routes import complete_response
from treadle_server.routes.answers import name_param
from treadle_server.routes.chat import complete_chat
from treadle_server.routes.completions import complete_text
from treadle_server.wire.chat import ChatRequest
from treadle_server.wire.common import SamplingFields
from treadle_server.wire.completions import CompletionRequest

__all__ = ("ENDPOINTS", "BatchClient", "LineExecutor", "failure_output")

LOW_PRIORITY = 1_000_000
"""Added to the priority of a line, if the scheduler heeds priorities: lower ones are served first."""
MAX_PRIORITY = int(BOUNDS["priority"][1])
RETRY_SECONDS = 0.5
"""Pause before a line is sent again for which the engine has had no room."""


class BatchClient(msgspec.Struct, frozen=True):
    """Whose batch it is: ``name`` has a share of the threads for texts, ``owner`` its responses."""

    name: str
    owner: str = ""


Complete = Callable[[ServerContext, Any, BatchClient], Awaitable[Any]]


async def _chat(context: ServerContext, data: ChatRequest, client: BatchClient) -> Any:
    completion, _ = await complete_chat(context, data, client.name)
    return completion


async def _text(context: ServerContext, data: CompletionRequest, client: BatchClient) -> Any:
    return await complete_text(context, data, client.name)


async def _response(context: ServerContext, data: ResponsesRequest, client: BatchClient) -> Any:
    return await complete_response(context, data, client.name, client.owner)


ENDPOINTS: dict[str, tuple[type[SamplingFields], Complete]] = {
    "/v1/chat/completions": (ChatRequest, _chat),
    "/v1/completions": (CompletionRequest, _text),
    "/v1/responses": (ResponsesRequest, _response),
}


class LineExecutor:
    """Answers the lines of one client, those of a server when there are ``slots`` for them."""

    def __init__(
        self, context: ServerContext, client: BatchClient, slots: LineSlots | None = None
    ) -> None:
        self._context, self._client, self._slots = context, client, slots
        self._decoders = {
            url: RequestDecoder(kind, strict=context.config.strict_requests)
            for url, (kind, _) in ENDPOINTS.items()
        }

    async def execute(self, line: BatchLine) -> LineOutput:
        """Return the answer to a line, which may be an error.

        Raises ``EngineDeadError``: it says nothing about the line.
        """
        data, status, ignored = None, 200, ""
        try:
            data, ignored = self._decoders[line.url].decode(bytes(line.body))
            body = await self._complete(line.url, data)
        except EngineDeadError:
            raise
        except Exception as error:
            api_error = error_of(error)
            name_param(api_error, data)
            body, status = api_error.body, api_error.status
        response = LineResponse(
            status_code=status,
            request_id=secrets.token_hex(16),
            body=body,
            ignored_fields=ignored or None,
        )
        return LineOutput(id=new_output_id(), custom_id=line.custom_id, response=response)

    async def _complete(self, url: str, data: SamplingFields) -> Any:
        if data.stream:
            raise RequestError(
                "stream is true; a line of a batch is answered whole: leave it out", param="stream"
            )
        data.stream = None
        if self._context.engine.assets.priorities:
            data.priority = min(LOW_PRIORITY + max(0, data.priority or 0), MAX_PRIORITY)
        _, complete = ENDPOINTS[url]
        async with nullcontext() if self._slots is None else self._slots.taken(num_sequences(data)):
            while True:
                try:
                    return await complete(self._context, data, self._client)
                except QueueFullError:
                    await asyncio.sleep(RETRY_SECONDS)


def num_sequences(data: SamplingFields) -> int:
    """Return how many sequences of the engine a request is, before it is checked."""
    prompt: Any = getattr(data, "prompt", None)
    num_prompts = 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        num_prompts = len(prompt)
    return max(1, data.n or 1, data.best_of or 1) * num_prompts


def failure_output(
    custom_id: str | None, code: str, message: str, line: int | None = None
) -> LineOutput:
    """Return the line for a request that was not run."""
    failure = LineFailure(code=code, message=message, line=line)
    return LineOutput(id=new_output_id(), custom_id=custom_id, error=failure)


def new_output_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
