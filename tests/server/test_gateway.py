"""Keys, hosts, origins, prefixes: who may ask at all."""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import Server, serving

from treadle_server import keys
from treadle_server.gateway import GatewayMiddleware

KEYS = {"api_key": ["k1", "k2-é"]}


async def paths(server: Server) -> list[str]:
    """Every route of the application, plugins' included."""
    return sorted({route.path for route in server.context.app_instance.app.routes})


async def test_every_route_but_the_public_ones_needs_a_key() -> None:
    async with serving(**KEYS) as server:
        public = server.context.app_instance.public_routes
        own = {path for _, path in public if not path.startswith("/ui")}  # the rest is a plugin's
        assert own == {"/", "/health", "/ping", "/ready"}
        routes = await paths(server)
        assert "/tokenize" in routes and len(routes) >= 9
        for path in [*routes, "/nope", "/v1/models/x", "/metrics/"]:
            for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
                response = await server.client.request(method, path.replace("{name:path}", "x"))
                if (method, path) in public:
                    assert response.status_code in (200, 204), (method, path)
                else:
                    assert response.status_code == 401, (method, path)
                    assert "x-request-id" in response.headers


SPELLINGS = [
    b"GET //v1/models HTTP/1.1",
    b"GET /v1%2fmodels HTTP/1.1",
    b"GET /health/../v1/models HTTP/1.1",
    b"GET /health/ HTTP/1.1",
    b"GET /health;/v1/models HTTP/1.1",
    b"GET /HEALTH HTTP/1.1",
    b"GET http://localhost/v1/models HTTP/1.1",
    b"GET /v1/models?/health HTTP/1.1",
    b"GET /v1/models HTTP/1.0",
]


async def test_no_spelling_of_a_path_goes_around_the_key() -> None:
    async with serving(**KEYS) as server:
        for line in SPELLINGS:
            answer = await server.raw(line + b"\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert answer.split(b" ", 2)[1] in (b"401", b"400"), answer[:200]


SENT: list[tuple[dict[str, Any], int]] = [
    ({"authorization": "Bearer k1"}, 200),
    ({"authorization": "bearer k1"}, 200),
    ({"authorization": "Bearer k2-é".encode()}, 200),
    ({"x-api-key": "k1"}, 200),
    ({"authorization": "Bearer k"}, 401),
    ({"authorization": "Bearer k11"}, 401),
    ({"authorization": "Bearer"}, 401),
    ({"authorization": "Basic k1"}, 401),
    ({"authorization": b"Bearer \xff\xfe"}, 401),
    ({"authorization": "Bearer " + "x" * 60_000}, 401),
    ({"authorization": ""}, 401),
]


async def test_keys() -> None:
    async with serving(**KEYS) as server:
        for headers, status in SENT:
            response = await server.client.get("/v1/models", headers=headers)
            assert response.status_code == status, headers
            if status == 401:
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert "k1" not in response.text


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    digests = [hashlib.sha256(k).digest() for k in (b"a", b"b", b"c")]
    assert keys.any_equal(digests[0], digests)
    assert compared == [(digests[0], d) for d in digests]


async def test_a_loopback_server_knows_its_names() -> None:
    async with serving(allowed_hosts=["treadle.test"]) as server:
        for host, status in {
            "localhost:1": 200,
            "127.0.0.1": 200,
            "[::1]:8000": 200,
            "treadle.test": 200,
            "evil.example": 403,
            "localhost.evil.example": 403,
            "127.0.0.1.evil.example:80": 403,
            "": 403,
            "[::1": 400,
            "[::1]evil": 400,
            "localhost:1:evil": 400,
            "localhost:port": 400,
            "evil@localhost": 400,
            "localhost/evil": 400,
        }.items():
            response = await server.client.get("/version", headers={"host": host})
            assert response.status_code == status, host


@pytest.mark.parametrize(
    "header", [b"host: localhost", b"authorization: Bearer k1", b"x-api-key: k1", b"origin: null"]
)
async def test_a_header_that_decides_is_sent_once(header: bytes) -> None:
    """A proxy may have read the other one."""
    async with serving(**KEYS) as server:
        required = b"" if header.startswith(b"host") else b"host: localhost\r\n"
        head = b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n" + required
        answer = await server.raw(head + header + b"\r\n" + header + b"\r\n\r\n")
    assert answer.split(b" ", 2)[1] == b"400", answer[:200]


async def test_web_pages_of_others_may_not_use_a_local_server() -> None:
    body = {"prompt": "a"}
    async with serving() as server:
        same_origin = {"origin": f"http://127.0.0.1:{server.port}"}
        evil = {"origin": "https://evil.example"}
        assert (await server.post("/v1/completions", body, headers=same_origin)).status_code == 200
        assert (await server.post("/v1/completions", body, headers=evil)).status_code == 403
        for origin in ("null", "http://[::1", "http://127.0.0.1"):
            refused = await server.post("/v1/completions", body, headers={"origin": origin})
            assert refused.status_code == 403, origin
        preflight = await server.client.options(
            "/v1/completions", headers={**evil, "access-control-request-method": "POST"}
        )
        assert preflight.status_code == 403


async def test_cors_lets_named_origins_in_and_nobody_else() -> None:
    good, evil = "https://app.example", "https://evil.example"
    async with serving(allowed_origins=[good], **KEYS) as server:
        asks = {"access-control-request-method": "POST"}
        preflight = await server.client.options("/v1/completions", headers={"origin": good, **asks})
        refused = await server.client.options("/v1/completions", headers={"origin": evil, **asks})
        key = {"authorization": "Bearer k1", "origin": good}
        answer = await server.post("/v1/completions", {"prompt": "a"}, headers=key)
        naked = await server.client.options("/v1/completions")
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == good
    assert refused.status_code == 403
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == good
    assert naked.status_code == 401


async def test_a_prefix_of_a_proxy_is_stripped_if_it_is_there() -> None:
    async with serving(root_path="/llm", **KEYS) as server:
        key = {"authorization": "Bearer k1"}
        for path in ("/llm/v1/models", "/v1/models"):
            assert (await server.client.get(path, headers=key)).status_code == 200
            assert (await server.client.get(path)).status_code == 401
        assert (await server.client.get("/llm/health")).status_code == 200
        assert (await server.client.get("/llmfoo/health")).status_code == 401


async def test_forwarded_headers_change_nothing() -> None:
    forged = {
        "x-forwarded-for": "127.0.0.1",
        "x-forwarded-host": "evil",
        "x-forwarded-proto": "https",
    }
    async with serving(**KEYS) as server:
        assert (await server.client.get("/v1/models", headers=forged)).status_code == 401


async def test_a_client_that_leaves_before_the_last_event_is_no_fault(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event may be on its way when the server learns that nobody waits for it."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"data", "more_body": True})

    async def disconnect() -> Any:
        return {"type": "http.disconnect"}

    async def ignored(message: Any) -> None:
        """What a server does with what nobody reads."""

    scope: Any = {"type": "http", "method": "POST", "path": "/v1/completions"}
    scope["headers"] = [(b"host", b"localhost")]
    async with serving() as server:
        monkeypatch.setattr(server.context.app_instance, "app", answer)
        with caplog.at_level(logging.INFO, "treadle.server"):
            await GatewayMiddleware(server.context)(scope, disconnect, ignored)
    (record,) = caplog.records
    assert record.getMessage().startswith("the client of POST /v1/completions left")


async def test_each_key_has_cached_prefixes_of_its_own() -> None:
    """How fast a prompt is would tell one client what another has asked."""
    engine = ScriptedEngine()

    async def salt(server: Server, key: str, path: str, **fields: Any) -> str | None:
        body = (
            {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
        )
        headers = {"authorization": f"Bearer {key}"}
        answer = await server.post(path, {**body, **fields}, headers=headers)
        assert answer.status_code == 200 and engine.params is not None
        return engine.params.cache_salt

    for path in ("/v1/chat/completions", "/v1/completions"):
        async with serving(engine, api_key=["a", "b"]) as server:
            salts = [
                await salt(server, key, path, **fields)
                for key in "ab"
                for fields in ({}, {"cache_salt": "mine"})
            ]
            assert len(set(salts)) == 4 and "mine" not in salts
            assert await salt(server, "a", path) == salts[0]
        async with serving(engine, api_key=["a", "b"], share_prefix_cache=True) as server:
            assert await salt(server, "a", path) is None
            assert await salt(server, "b", path, cache_salt="mine") == "mine"
        async with serving(engine) as server:
            assert await salt(server, "a", path) is None
