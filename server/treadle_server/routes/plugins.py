"""``GET /plugins``: what ``treadle plugin list`` shows, as this server sees it while it runs.

``POST /plugins/{id}/reload`` reloads the code of one distribution, for administrators.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import msgspec
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler

from treadle.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
    PluginReloadError,
)
from treadle.plugins.entries import normal
from treadle.testing.examination.listing import Row, rows
from treadle_server.context import ServerContext
from treadle_server.errors import APIError
from treadle_server.isolation import refused
from treadle_server.keys import Keys
from treadle_server.openapi import CONFLICT, error_responses
from treadle_server.outcomes import hanging
from treadle_server.plugin_reload import RELOADABLE, ReloadResult
from treadle_server.reload import reload

__all__ = ("handlers",)


class PluginList(msgspec.Struct, kw_only=True):
    object: str = "list"
    system_fingerprint: str
    data: list[dict[str, str]]


BROKEN = error_responses({422: "The new code cannot be loaded; the old one stays"})


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    admins = Keys(context.config.admin_api_key)

    @get("/plugins", summary="List the installed plugins")
    async def plugins() -> PluginList:
        # The metadata of every distribution is read: not on the event loop.
        row_list: list[Row] = await asyncio.to_thread(lambda: list(rows(context.engine.plugins)))
        states = context.stats.plugin_states if context.stats is not None else {}
        hangs = hanging(context.engine.parser_watchdog) | refused(context.engine.plugins)
        return PluginList(
            system_fingerprint=context.fingerprint,
            data=[
                {
                    **describe(row, states, hangs),
                    "code": context.plugin_code.get(normal(row.distribution), ""),
                }
                for row in row_list
            ],
        )

    @post(
        "/plugins/{id:str}/reload",
        status_code=200,
        responses={**CONFLICT, **BROKEN},
        summary="Reload the code of a plugin",
    )
    async def reload_plugin(request: Request[Any, Any, Any]) -> ReloadResult:
        check_admin(context, admins, dict(reversed(cast("Any", request.scope)["headers"])))
        id = request.path_params["id"]
        try:
            return await reload(context, id)
        except PluginNotFoundError as error:
            raise APIError(404, str(error), param="id", code="plugin_not_found") from error
        except (PluginReloadError, PluginConflictError) as error:
            raise APIError(409, str(error), param="id", code="plugin_not_reloadable") from error
        except (PluginLoadError, ConfigError) as error:
            raise APIError(422, str(error), param="id", code="plugin_broken") from error

    return [plugins, reload_plugin]


def check_admin(context: ServerContext, admins: Keys, headers: Mapping[bytes, bytes]) -> None:
    """Raise ``APIError`` unless an administrator's key was sent."""
    if not admins:
        raise APIError(
            403,
            "this server reloads nothing, because nobody may administer it; start it with "
            "--admin-api-key KEY (or TREADLE_ADMIN_API_KEY) and send that key",
            code="admin_disabled",
        )
    if admins.sent_in(headers):
        return
    hint = "reloading needs an --admin-api-key; send it as Authorization: Bearer KEY"
    if context.config.api_key:  # the gateway has refused requests without a key
        raise APIError(403, f"this key may not administer: {hint}", code="admin_key_required")
    raise APIError(401, hint, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def describe(
    row: Row, states: Mapping[str, str], hangs: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return a row with its id and its state, without paths of this machine.

    The state is that of the server's process for kinds that can be reloaded, and of the engine's for
    all others. A plugin that is broken in either is broken, and so is one of ``hangs``, which holds the
    reason.
    """
    fields = msgspec.structs.asdict(row)
    del fields["target"]
    id, state = f"{row.kind}:{row.key}", row.state
    if state != "broken" and (row.kind not in RELOADABLE or state == "ready"):
        state = states.get(id, state)
    if id in hangs and state == "loaded":
        return {"id": id, **fields, "state": "broken", "note": hangs[id]}
    return {"id": id, **fields, "state": state}
