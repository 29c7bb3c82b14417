"""The application: routes, error handling, the hook of plugins, and the gateway around them."""

from __future__ import annotations

from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from treadle.plugins import PluginManager
from treadle_server.active_requests import ClientDisconnected
from treadle_server.app_instance import AppInstance
from treadle_server.batches import batch_routes, file_routes
from treadle_server.context import ServerContext
from treadle_server.error_forms import ErrorForms
from treadle_server.errors import APIError
from treadle_server.gateway import GatewayMiddleware
from treadle_server.hookspecs import SERVER
from treadle_server.messages import routes as messages
from treadle_server.messages.errors import PATH as MESSAGES
from treadle_server.messages.errors import to_anthropic
from treadle_server.openapi import openapi_config
from treadle_server.plugin_faults import PluginFaults
from treadle_server.responses import routes as responses
from treadle_server.routes import chat, completions, health, metrics, models
from treadle_server.routes.answers import handle_disconnect, handle_error, handle_http_error

__all__ = ("base_app_config", "build", "create_app")

ROUTES = (
    chat,
    completions,
    responses,
    messages,
    file_routes,
    batch_routes,
    models,
    health,
    metrics,
)


def create_app(context: ServerContext) -> GatewayMiddleware:
    """Build the ASGI application of one server."""
    context.app_instance = build(context, context.engine.plugins, is_first=True)
    return GatewayMiddleware(context)


def build(context: ServerContext, plugins: PluginManager, *, is_first: bool = False) -> AppInstance:
    """The routes, after the plugins of ``treadle.server`` in ``plugins`` have edited them.

    Called again with the new plugin manager when a plugin is reloaded.
    """
    config = base_app_config(context)
    error_forms: ErrorForms = config.state.error_forms
    try:
        for entry in plugins.loaded(SERVER):
            options = plugins.options_of(entry, entry.key)
            plugins.hooks(entry).treadle_server(app=config, engine=context.engine, options=options)
        names = context.metrics.checked(config.state.metric_names, may_grow=is_first)
        app = Litestar.from_config(config)
    except Exception as error:  # a plugin may put anything into it
        raise PluginFaults(plugins).build_error(error) from error
    return AppInstance(app, PluginFaults(plugins), error_forms, names)


def base_app_config(context: ServerContext) -> AppConfig:
    """Return the configuration of the application before plugins edit it."""
    error_forms = ErrorForms()
    error_forms.set(MESSAGES, to_anthropic)
    return AppConfig(
        route_handlers=[handler for module in ROUTES for handler in module.handlers(context)],
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
        state=State(
            {
                "context": context,
                "error_forms": error_forms,
                "metric_names": list(context.metrics.names),
            }
        ),
        debug=False,
    )


def cors(context: ServerContext) -> CORSConfig | None:
    if not context.config.allowed_origins:
        return None
    return CORSConfig(
        allow_origins=context.config.allowed_origins,
        allow_headers=["*"],
        allow_methods=["GET", "POST", "DELETE"],
        expose_headers=["x-request-id", "request-id", "x-ignored-fields", "retry-after"],
    )
