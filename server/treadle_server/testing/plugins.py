"""The conformance suite of server plugins: requests to the application that they edit.

::

    class TestMine(PluginSuite, ServerSuite):
        plugin = "server:mine"
        skipped_paths = ["/events"]  # paths that must not be requested: their answer never ends
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest
from litestar.config.app import AppConfig
from litestar.routes import ASGIRoute, BaseRoute, HTTPRoute

from treadle.plugins import PluginManager
from treadle.testing.plugin import PluginTest
from treadle_server.app import base_app_config, create_app
from treadle_server.config import server_from_options
from treadle_server.context import ServerContext
from treadle_server.errors import APIError
from treadle_server.gateway import GatewayMiddleware
from treadle_server.testing.client import Answer, ask
from treadle_server.testing.engine import FakeEngine

__all__ = ("NAME", "Route", "Server", "ServerSuite")

TIMEOUT = 3.0
"""Seconds until a part of a stream must have arrived."""
KEY = "a-key-of-the-test"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
NAME = "a-model-of-the-test"
BODIES = (b"", b"{", b"[]", b"null", b'"text"', b'{"a": {"b": [1, null]}}', b"\xff\x00", b"1" * 99)
WITH_BODY = ("POST", "PUT", "PATCH")
PARAMETERS = {"int": "1", "float": "1.5", "uuid": "0" * 8 + "-0000" * 3 + "-" + "0" * 12}
STREAM = ("POST", "/v1/completions", b'{"prompt": "a", "stream": true}')
CORE = (
    ("GET", "/health", b""),
    ("GET", "/ready", b""),
    ("GET", "/v1/models", b""),
    ("GET", "/nowhere", b""),
    ("PUT", "/v1/models", b""),
    ("POST", "/v1/completions", b"{"),
    ("POST", "/v1/completions", b'{"prompt": "a", "model": "unheard-of"}'),
    ("POST", "/v1/completions", b'{"prompt": "a"}'),
    STREAM,
    ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}'),
)
CHANGING = re.compile(rb'"(id|created|system_fingerprint)":("[^"]*"|\d+)')
LISTS = (
    "after_exception",
    "before_send",
    "guards",
    "lifespan",
    "listeners",
    "middleware",
    "on_shutdown",
    "on_startup",
    "plugins",
    "route_handlers",
)
"""Fields of ``AppConfig`` that plugins share."""


class Route(NamedTuple):
    """A method and a path, in which parameters have values."""

    method: str
    path: str


class Server(NamedTuple):
    """A server that is called without a network."""

    engine: FakeEngine
    context: ServerContext
    gateway: GatewayMiddleware

    @property
    def routes(self) -> list[Route]:
        return list(_routes(self.context.app_instance.app.routes))


class ServerSuite(PluginTest):
    """Checks that the plugin's routes work and that the server's own routes stay the same."""

    skipped_paths: ClassVar[Sequence[str]] = ()
    headers: ClassVar[Mapping[str, str]] = {}
    """What a client of the plugin must send, beside the API key."""
    base_routes: ClassVar[Sequence[Route]]
    """What a server without the plugin answers, once a check has asked."""

    # -- servers ---------------------------------------------------------------------

    def manager_without_plugin(self) -> PluginManager:
        """Return a plugin manager with all plugins except the tested one."""
        plugins = self.plugin_manager()
        plugins.entries = [entry for entry in plugins.entries if entry.id != self.plugin]
        return plugins

    def server(
        self, plugins: PluginManager | None = None, name: str = NAME, **options: Any
    ) -> Server:
        """Return a server that was not started; plugins have edited its application."""
        keys: dict[str, list[str]] = {"api_key": [], "admin_api_key": []}  # none of the environment
        config = server_from_options({**keys, **options})
        engine = FakeEngine(plugins or self.plugin_manager(), name)
        context = ServerContext(engine, config)
        return Server(engine, context, create_app(context))

    @asynccontextmanager
    async def running(self, server: Server) -> AsyncIterator[GatewayMiddleware]:
        await server.context.app_instance.start()
        try:
            yield server.gateway
        finally:
            await server.context.app_instance.stop()
            server.context.close()

    def edit(self, config: AppConfig, server: Server) -> AppConfig:
        """``config`` after the hook of this plugin alone."""
        plugins = self.plugin_manager()
        relay: Any = plugins.hooks_for(self.kind, self.key)
        options = plugins.options(self.kind, self.key)
        relay.treadle_server(app=config, engine=server.engine, options=options)
        return config

    def routes(self) -> list[Route]:
        """Return the routes that the plugin adds."""
        suite = type(self)
        if "base_routes" not in vars(suite):  # the same for each check; a server takes a while
            suite.base_routes = self.server(self.manager_without_plugin()).routes
        return [route for route in self.server().routes if route not in suite.base_routes]

    def responses(self) -> list[Route]:
        return [route for route in self.routes() if route.path not in self.skipped_paths]

    def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Return the answer of a new server with the model name ``NAME``."""

        async def main() -> Answer:
            async with self.running(self.server()) as gateway:
                return await ask(gateway, method, path, body, headers=self.headers)

        return asyncio.run(main())

    # -- what was there before -------------------------------------------------------

    def test_what_the_server_answers_stays_the_same(self) -> None:
        async def answers(plugins: PluginManager) -> list[Answer]:
            async with self.running(self.server(plugins)) as gateway:
                return [await ask(gateway, *request, headers=self.headers) for request in CORE]

        expected, actual = (
            asyncio.run(answers(self.manager_without_plugin())),
            asyncio.run(answers(self.plugin_manager())),
        )
        for request, before, after in zip(CORE, expected, actual, strict=True):
            assert (after.status, _constant(after)) == (before.status, _constant(before)), request
            missing = before.headers.keys() - after.headers.keys()
            assert missing == set(), f"{request} has no headers {missing}"

    def test_a_stream_is_not_held_back(self) -> None:
        """Each output reaches the client before the engine generates the next one."""

        async def main() -> None:
            server = self.server()
            event = server.engine.resume_event = asyncio.Event()
            async with self.running(server) as gateway:
                streamed = ask(
                    gateway, *STREAM, headers=self.headers, received=event.set, seconds=TIMEOUT
                )
                try:
                    assert (await streamed).status == 200
                except TimeoutError:
                    pytest.fail("nothing reaches the client until the answer is complete")

        asyncio.run(main())

    def test_what_others_have_added_stays_in_order(self) -> None:
        """The server itself, and other plugins, edit the same application."""

        async def main() -> None:
            server = self.server()
            config: Any = base_app_config(server.context)
            for field in LISTS:
                getattr(config, field).extend((object(), object()))
            before = {field: list(getattr(config, field)) for field in LISTS}
            handlers = dict(config.exception_handlers)
            self.edit(config, server)
            for field, originals in before.items():
                remaining = [item for item in getattr(config, field) if item in originals]
                assert remaining == originals, f"app.{field} has lost or moved something"
            new_handlers = config.exception_handlers
            missing = [name for name, item in handlers.items() if new_handlers.get(name) != item]
            assert missing == [], "app.exception_handlers"
            assert config.state.context is server.context, "app.state.context"

        asyncio.run(main())

    # -- what the plugin adds --------------------------------------------------------

    def test_its_routes_need_the_key(self) -> None:
        """All but the public ones, which tell nobody what this server is."""

        async def main() -> None:
            server = self.server(api_key=[KEY])
            public_routes = server.context.app_instance.public_routes
            async with self.running(server) as gateway:
                for route in self.routes():
                    answer = await ask(gateway, *route, headers=self.headers)
                    if route in public_routes:
                        assert NAME.encode() not in answer.body, f"{route} names the model"
                        continue
                    assert answer.status == 401, f"{route} answers {answer.status} without a key"
                    _check_answer(route, answer, server)

        asyncio.run(main())

    def test_its_routes_answer(self) -> None:
        """Also where a parameter is missing or wrong: an error has the form of the OpenAI API, or
        the one that the plugin has set for the path."""
        headers = {**self.headers, **WITH_KEY}

        async def main() -> None:
            server = self.server(api_key=[KEY])
            async with self.running(server) as gateway:
                for route in self.responses():
                    if route.method not in WITH_BODY:
                        answer = await ask(gateway, *route, headers=headers)
                        _check_answer(route, answer, server)

        asyncio.run(main())

    def test_a_bad_body_is_the_mistake_of_the_client(self) -> None:
        headers = {**self.headers, **WITH_KEY}

        async def main() -> None:
            server = self.server(api_key=[KEY])
            async with self.running(server) as gateway:
                for route in self.responses():
                    for body in BODIES if route.method in WITH_BODY else ():
                        answer = await ask(gateway, *route, body, headers=headers)
                        _check_answer(route, answer, server, body)

        asyncio.run(main())

    # -- lifespan --------------------------------------------------------------------

    def test_two_servers_of_one_process_share_nothing(self) -> None:
        """Each of their routes knows its own server, whichever was made or asked first."""

        async def main() -> None:
            names, routes = ("the-first-model", "the-second-model"), self.responses()
            servers = [self.server(name=name) for name in names]
            async with self.running(servers[0]) as first, self.running(servers[1]) as second:
                for _ in range(2):
                    for gateway, name in zip((first, second), names, strict=True):
                        other_names = {NAME, *names} - {name}
                        for route in routes:
                            body = b"{}" if route.method in WITH_BODY else b""
                            answer = await ask(gateway, *route, body, headers=self.headers)
                            text = answer.body.decode(errors="replace")
                            assert not any(n in text for n in other_names), (
                                f"{route} of {name}: {text}"
                            )

        asyncio.run(main())

    def test_it_may_be_called_again(self) -> None:
        """A reload calls the hook again, in another thread, while the server runs."""

        def sizes() -> dict[str, int]:
            server = self.server()
            config = self.edit(base_app_config(server.context), server)
            return {field: len(getattr(config, field)) for field in LISTS}

        async def main() -> None:
            first = sizes()
            assert await asyncio.to_thread(sizes) == first, "it adds what it has added before"

        asyncio.run(main())

    def test_nothing_is_opened_before_the_start(self) -> None:
        """The hook is also called for a server that never starts."""

        async def main() -> None:
            before = _open_resources()
            self.server().context.close()
            assert _open_resources() - before == set(), (
                "what it opens belongs into a lifespan manager"
            )

        asyncio.run(main())

    def test_what_it_opens_is_closed_at_the_end(self) -> None:
        """A new application starts before the old one ends, and either may end first."""

        async def main() -> None:
            servers = [self.server().context.app_instance for _ in range(3)]
            before = _open_resources()
            for app in servers:
                await app.start()
            for app in (servers[1], servers[0], servers[2]):
                await app.stop()
            assert _open_resources() - before == set(), "it is still open"

        asyncio.run(main())


def _routes(routes: Sequence[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        parts = (part if isinstance(part, str) else _value(part) for part in route.path_components)
        path = "/" + "/".join(parts)
        if isinstance(route, HTTPRoute):
            yield from (Route(method, path) for method in route.methods if method != "OPTIONS")
        elif isinstance(route, ASGIRoute):
            yield Route("GET", path)


def _value(parameter: Any) -> str:
    return PARAMETERS.get(parameter.type.__name__.lower(), "x")


def _constant(answer: Answer) -> bytes:
    """Return the body without the fields that differ between answers."""
    return CHANGING.sub(rb'"\1":0', answer.body)


def _check_answer(route: Route, answer: Answer, server: Server, body: bytes = b"") -> None:
    assert answer.status != 500, f"{route} fails: {body!r}"
    if answer.status < 400:
        return
    has_form = answer.error is not None
    if (form := server.context.app_instance.error_forms.of(route.path)) is not None:
        expected = form(APIError(answer.status, "a text"), "an-id")
        has_form = _shape(answer.body) == _shape(msgspec.json.encode(expected))
    assert has_form, f"{route} answers {body!r} with {answer.body[:200]!r}"


def _shape(body: bytes) -> Any:
    """Return the keys of some JSON, nested as they are; ``None`` if it is not an object."""

    def shape(value: Any) -> Any:
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else None

    try:
        return shape(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _open_resources() -> set[Any]:
    """Return the threads of the process and the tasks of the event loop."""
    return {*threading.enumerate(), *asyncio.all_tasks()}
