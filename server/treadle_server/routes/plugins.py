"""``GET /plugins``: what ``treadle plugin list`` shows, as this server sees it while it runs.

``POST /plugins/{id}/reload`` exchanges the code of one distribution, for administrators.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from treadle.testing.examination.listing import Row, rows
from treadle_server.context import LARGE, ServerContext
from treadle_server.errors import APIError
from treadle_server.exchange import RELOADABLE, Reloaded
from treadle_server.keys import Keys
from treadle_server.reload import reload

__all__ = ("handlers",)


class PluginList(msgspec.Struct, kw_only=True):
    object: str = "list"
    system_fingerprint: str
    data: list[dict[str, str]]


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    admins = Keys(context.config.admin_api_key)

    @get("/plugins", summary="List the installed plugins")
    async def plugins() -> PluginList:
        # The metadata of every distribution is read: not on the event loop.
        found: list[Row] = await context.run_in_thread_if_large(
            LARGE, lambda: list(rows(context.engine.plugins))
        )
        states = context.stats.plugin_states if context.stats is not None else {}
        return PluginList(
            system_fingerprint=context.fingerprint, data=[shown(row, states) for row in found]
        )

    @post("/plugins/{id:str}/reload", status_code=200, summary="Exchange the code of a plugin")
    async def reload_plugin(request: Request[Any, Any, Any]) -> Reloaded:
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
    wanted = "reloading needs an --admin-api-key; send it as Authorization: Bearer KEY"
    if context.config.api_key:  # one of those was sent, or the edge had refused
        raise APIError(403, f"this key may not administer: {wanted}", code="admin_key_required")
    raise APIError(401, wanted, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def shown(row: Row, states: dict[str, str]) -> dict[str, str]:
    """A row with its id, and the state in the process where such plugins live: here those that can
    be reloaded, in the engine all others; broken anywhere is broken. Paths stay inside."""
    told = msgspec.structs.asdict(row)
    del told["target"]
    id, state = f"{row.kind}:{row.key}", row.state
    if state != "broken" and (row.kind not in RELOADABLE or state == "ready"):
        state = states.get(id, state)
    return {"id": id, **told, "state": state}
