"""The application that an isolated server plugin edits, and what may be edited of it.

It has no routes but the plugin's. What acts on the routes of others would act on nothing here, and the plugin
would seem to work: such an edit is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from litestar import Litestar, Request, Response
from litestar.config.app import AppConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.routes import BaseRoute, HTTPRoute

from treadle.errors import PluginLoadError
from treadle_server.errors import APIError, known_error
from treadle_server.isolation.route_engine import Engine, IsolatedContext, Refusing
from treadle_server.isolation.route_wire import Route, Start

__all__ = ("FAILURE", "app_config", "build", "refuse_edits", "routes", "to_refusal")

FAILURE = "treadle_failure"
"""Where the scope of a request has the exception that a handler has raised."""
OWN = frozenset(
    {
        "dependencies",
        "lifespan",
        "on_shutdown",
        "on_startup",
        "parameters",
        "route_handlers",
        "signature_namespace",
        "signature_types",
        "state",
        "stores",
        "type_decoders",
        "type_encoders",
    }
)
"""Fields of ``AppConfig`` that act on the plugin's own routes only, or on no routes."""
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "middleware": "middleware wraps the routes of others, which are answered in another process",
        "guards": "guards of the application decide about the routes of others",
    }
)


def app_config(engine: Engine, start: Start) -> AppConfig:
    """Return the application before the plugin edits it."""
    return AppConfig(
        exception_handlers={HTTPException: keep_failure, 500: keep_failure},
        logging_config=None,
        openapi_config=None,
        request_max_body_size=start.max_body_bytes,
        state=State(
            {
                "context": IsolatedContext(engine, start.models),
                "error_forms": Refusing("the server's forms of errors (set_error_form)"),
                "metric_names": Refusing("the server's names of metrics"),
            }
        ),
    )


def keep_failure(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Keep what a handler has raised: the server writes the answer."""
    scope: Any = request.scope
    scope[FAILURE] = error
    return Response(b"", status_code=500)


def snapshot(config: AppConfig) -> dict[str, Any]:
    """Return the fields of ``config``, with copies of those that can be edited in place."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in OWN}
    return {n: copy(v) if isinstance(v, (dict, list, set)) else v for n, v in values.items()}


def refuse_edits(before: Mapping[str, Any], config: AppConfig, id: str) -> None:
    """Raise ``PluginLoadError`` for edits of ``config`` that act on the routes of others.

    ``before`` is a ``snapshot`` of it, ``id`` names the plugin.
    """
    edited = [name for name, value in before.items() if getattr(config, name) != value]
    if edited:
        names = ", ".join(f"app.{name}" for name in edited)
        reason = REASONS.get(edited[0], "it acts on the routes of others or on the whole server")
        raise PluginLoadError(
            f"{id} cannot be isolated: it edits {names}; {reason}. An isolated server plugin may add "
            "routes and what these use; start the server without --isolate for it if you trust it"
        )


def build(engine: Engine, start: Start, id: str, edit: Any) -> tuple[Litestar, list[Route]]:
    """Return the application as ``edit`` has edited it, and its routes.

    Raises ``PluginLoadError``, and what ``edit`` and litestar raise.
    """
    config = app_config(engine, start)
    before = snapshot(config)
    edit(config)
    refuse_edits(before, config, id)
    app = Litestar.from_config(config)
    return app, [route for place in app.routes for route in routes(place, id)]


def routes(place: BaseRoute, id: str) -> Iterator[Route]:
    """Yield what is answered at one path. Raises ``PluginLoadError`` for what is not HTTP."""
    if not isinstance(place, HTTPRoute):
        raise PluginLoadError(
            f"{id} cannot be isolated: {place.path} is not a route of HTTP methods; an isolated server "
            "plugin has no websockets and mounts no application"
        )
    for handler in place.route_handlers:
        if handler.handler_name == "options_handler" and handler.http_methods == {"OPTIONS"}:
            continue  # litestar adds it to each path, in the server as well
        for method in sorted(handler.http_methods):
            yield Route(
                path=place.path,
                method=str(getattr(method, "value", method)),
                is_public=handler.opt.get("public") is True,
                max_body=handler.resolve_request_max_body_size(),
                summary=handler.summary,
                description=handler.description if isinstance(handler.description, str) else None,
                in_schema=bool(handler.resolve_include_in_schema()),
            )


def to_refusal(error: BaseException) -> APIError | None:
    """Return the error that a handler has raised for its client; ``None`` for a failure."""
    if (known := known_error(error)) is not None:
        return known
    if isinstance(error, HTTPException) and error.status_code < 500:
        headers = {key.lower(): value for key, value in (error.headers or {}).items()}
        return APIError(error.status_code, str(error.detail), headers=headers)
    return None
