"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from treadle.errors import ModelNotFoundError
from treadle_server.context import Context
from treadle_server.routes.answers import json_answer
from treadle_server.wire.models import ModelCard, ModelList

__all__ = ("handlers",)


def handlers(context: Context) -> list[HTTPRouteHandler]:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=context.started,
            root=context.engine.config.model.model,
            max_model_len=context.engine.facts.max_model_len,
        )

    @get("/v1/models")
    async def models() -> Response[Any]:
        return json_answer(ModelList(data=[card(name) for name in context.names]))

    @get("/v1/models/{name:path}")
    async def model(request: Request[Any, Any, Any]) -> Response[Any]:
        wanted = str(request.path_params["name"]).removeprefix("/")
        if wanted not in context.names:
            served = ", ".join(context.names)
            raise ModelNotFoundError(
                f"the model {wanted[:256]!r} does not exist here; this server has: {served}"
            )
        return json_answer(card(wanted))

    return [models, model]
