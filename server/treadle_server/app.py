"""The application: routes, error handling, the hook of plugins, and the edge around it all."""

from __future__ import annotations

from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from treadle.plugins import PluginManager
from treadle_server.active_requests import ClientDisconnected
from treadle_server.context import ServerContext
from treadle_server.edge import GatewayMiddleware
from treadle_server.errors import APIError
from treadle_server.hookspecs import SERVER
from treadle_server.openapi import openapi_config
from treadle_server.owners import PluginFaults
from treadle_server.routes import chat, completions, health, metrics, models
from treadle_server.routes.answers import handle_disconnect, handle_error, handle_http_error
from treadle_server.served import AppInstance

__all__ = ("base_app_config", "build", "create_app")


def create_app(context: ServerContext) -> GatewayMiddleware:
    """Build the ASGI application of one server."""
    context.served = build(context, context.engine.plugins)
    return GatewayMiddleware(context)


def build(context: ServerContext, plugins: PluginManager) -> AppInstance:
    """The routes, after the plugins of ``treadle.server`` in ``plugins`` have edited them.

    Called again for each host: when a plugin is reloaded, there is another one.
    """
    config = base_app_config(context)
    try:
        plugins.call_all(SERVER, app=config, engine=context.engine)
        app = Litestar.from_config(config)
    except Exception as error:  # a plugin may put anything into it
        raise PluginFaults(plugins).build_error(error) from error
    return AppInstance(app, PluginFaults(plugins))


def base_app_config(context: ServerContext) -> AppConfig:
    """The application as plugins find it."""
    return AppConfig(
        route_handlers=[
            handler
            for module in (chat, completions, models, health, metrics)
            for handler in module.handlers(context)
        ],
        exception_handlers={
            APIError: handle_error,
            ClientDisconnected: handle_disconnect,
            HTTPException: handle_http_error,
            500: handle_error,
        },
        cors_config=cors(context),
        logging_config=None,
        openapi_config=openapi_config(context.config),
        request_max_body_size=context.config.max_body_bytes,
        state=State({"context": context}),
        debug=False,
    )


def cors(context: ServerContext) -> CORSConfig | None:
    if not context.config.allowed_origins:
        return None
    return CORSConfig(
        allow_origins=context.config.allowed_origins,
        allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
        allow_methods=["GET", "POST"],
        expose_headers=["x-request-id", "x-ignored-fields"],
    )
