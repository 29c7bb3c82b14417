"""``POST /v1/completions``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body

from treadle_server.completion_stream import ChoicesWriter
from treadle_server.completions.answer import TextChoiceStream, text_completion
from treadle_server.completions.prepare import prepare_completion
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.openapi import ERROR_RESPONSES
from treadle_server.routes.answers import answer
from treadle_server.routes.generate import complete, stream, until_disconnect
from treadle_server.wire.completions import Completion, CompletionRequest

__all__ = ("complete_text", "handlers")


async def complete_text(context: ServerContext, data: CompletionRequest, client: str) -> Completion:
    """Return the whole answer to a request of ``client``.

    Raises what ``prepare_completion`` and the engine raise.
    """
    prepare = partial(prepare_completion, context, data, client)
    generation, outputs, usage = await complete(context, prepare)
    return text_completion(context, generation, outputs, usage)


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @post(
        "/v1/completions",
        dto=request_body(CompletionRequest, strict=context.config.strict_requests),
        status_code=200,
        opt={"other_media_type": "text/event-stream"},
        responses=ERROR_RESPONSES,
        summary="Continue prompts",
        description="With `stream`, the answer is a stream of server-sent events, each of which "
        "holds a chunk, and the last of which is `[DONE]`.",
    )
    async def completions(
        data: Annotated[CompletionRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[Completion]:
        client = context.client_of(request)
        if data.stream:
            prepare = partial(prepare_completion, context, data, client)
            return stream(context, request, prepare, ChoicesWriter(context, TextChoiceStream))
        work = partial(complete_text, context, data, client)
        return answer(request, await until_disconnect(context, request, work))

    return [completions]
