"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler

from treadle.errors import ModelNotFoundError
from treadle_server.context import ServerContext
from treadle_server.wire.models import ModelCard, ModelList

__all__ = ("handlers",)


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=context.started,
            root=context.engine.config.model.model,
            max_model_len=context.engine.info.max_model_len,
        )

    @get("/v1/models", summary="List the names that requests may use")
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in context.names])

    @get("/v1/models/{name:path}", summary="Describe one model")
    async def model(request: Request[Any, Any, Any]) -> ModelCard:
        name = str(request.path_params["name"]).removeprefix("/")
        if name not in context.names:
            model_names = ", ".join(context.names)
            raise ModelNotFoundError(
                f"the model {name[:256]!r} does not exist here; this server has: {model_names}"
            )
        return card(name)

    return [models, model]
