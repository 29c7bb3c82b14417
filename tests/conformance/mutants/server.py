"""A plugin with two routes, a middleware and a lifespan, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle_server.testing.plugins import ServerSuite

SOURCE = """
import asyncio
import threading
from contextlib import asynccontextmanager

import msgspec

from treadle.api import impl
from treadle.errors import RequestError

TREADLE = {"server": ["mine"]}
SEEN = []


class Counted:
    def __init__(self, app):
        self.app, self.count = app, 0

    async def __call__(self, scope, receive, send):
        self.count += 1
        sent = []

        async def collect(message):
            sent.append(message)

        async def bare(message):
            await send({**message, "headers": []})

        await self.app(scope, receive, send)
        for message in sent:
            await send(message)


def tick():
    threading.Event().wait(9)


@asynccontextmanager
async def life(app):
    task = asyncio.create_task(asyncio.sleep(9))
    try:
        yield
    finally:
        task.cancel()


@impl
def treadle_server(app):
    from litestar import Request, get, post

    context = app.state.context
    SEEN.append(context)

    @get("/mine")
    async def about() -> dict[str, list[str]]:
        return {"models": context.names}

    @post("/mine/{number:int}")
    async def count(request: Request) -> dict[str, int]:
        try:
            found = msgspec.json.decode(await request.body(), type=dict[str, int])
        except msgspec.DecodeError as error:
            raise RequestError(f"the body is no table of numbers: {error}") from None
        return {"sum": request.path_params["number"] + sum(found.values())}

    app.route_handlers += [about, count]
    app.middleware.append(Counted)
    app.lifespan.append(life)
"""

SPECIMENS = (
    Specimen(
        suite=ServerSuite,
        plugin="server:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_what_the_server_answers_stays_the_same",
                {"self.app(scope, receive, send)": "self.app(scope, receive, bare)"},
            ),
            Mutant(
                "test_what_the_server_answers_stays_the_same",
                {'"/mine"': '["/mine", "/{rest:path}"]'},
            ),
            Mutant(
                "test_a_stream_is_not_held_back",
                {"self.app(scope, receive, send)": "self.app(scope, receive, collect)"},
            ),
            Mutant(
                "test_what_others_have_added_stays_in_order",
                {"app.middleware.append(Counted)": "app.middleware = [Counted]"},
            ),
            Mutant(
                "test_what_others_have_added_stays_in_order",
                {"app.lifespan.append(life)": "app.lifespan = [life, *reversed(app.lifespan)]"},
            ),
            Mutant(
                "test_its_routes_need_the_key",
                {'@get("/mine")': '@get("/mine", opt={"public": True})'},
            ),
            Mutant("test_its_routes_answer", {"return {": "return 1 / 0, {"}),
            Mutant(
                "test_its_routes_answer",
                {
                    "-> dict[str, list[str]]:": '-> dict[str, list[str]]:\n        from litestar import Response\n        return Response({"detail": "no"}, status_code=404)'
                },
            ),
            Mutant(
                "test_its_routes_answer",
                {
                    "app.lifespan": 'app.state.error_forms.set("/mine", lambda e, i: {"error": str(e)})\n    app.lifespan',
                    "-> dict[str, list[str]]:": '-> dict[str, list[str]]:\n        from litestar import Response\n        return Response({"detail": "no"}, status_code=404)',
                },
            ),
            Mutant(
                "test_a_bad_body_is_the_mistake_of_the_client",
                {"except msgspec.DecodeError": "except LookupError"},
            ),
            Mutant(
                "test_two_servers_of_one_process_share_nothing", {"context.names": "SEEN[-1].names"}
            ),
            Mutant(
                "test_two_servers_of_one_process_share_nothing", {"context.names": "SEEN[0].names"}
            ),
            Mutant(
                "test_it_may_be_called_again",
                {"app.middleware.append(Counted)": "app.middleware += [Counted] * len(SEEN)"},
            ),
            Mutant(
                "test_it_may_be_called_again",
                {"SEEN.append(context)": "asyncio.get_event_loop()"},
            ),
            Mutant(
                "test_nothing_is_opened_before_the_start",
                {"SEEN.append(context)": "threading.Thread(target=tick, daemon=True).start()"},
            ),
            Mutant("test_what_it_opens_is_closed_at_the_end", {"task.cancel()": "pass"}),
        ),
    ),
)
