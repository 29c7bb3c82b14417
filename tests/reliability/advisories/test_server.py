"""Advisories of HTTP servers: what a connection may make this one do."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import serving

from treadle_server.decode import RequestDecoder
from treadle_server.errors import APIError
from treadle_server.wire.completions import CompletionRequest

# Whoever adds a route says here that it was considered: who may call it, what it tells or changes, and
# which bounds its arguments have. None may take code, a file name, weights or a template.
ROUTES = {
    *("GET /health", "POST /health", "HEAD /health", "GET /ping", "POST /ping", "HEAD /ping"),
    *("GET /ready", "HEAD /ready", "GET /metrics", "GET /plugins", "GET /version"),
    *("GET /openapi.json", "GET /openapi.json/openapi.json", "GET /openapi.json/{path}"),
    *("POST /plugins/{id}/reload", "POST /tokenize", "POST /detokenize", "GET /v1/models"),
    *("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models/{name}"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens", "GET /tokenizer_info"),
    # What is stored belongs to the key that stored it, and its bytes are bounded.
    *("POST /v1/responses", "GET /v1/responses/{id}", "DELETE /v1/responses/{id}"),
    *("POST /v1/responses/{id}/cancel", "GET /v1/responses/{id}/input_items", "GET /", "HEAD /"),
    # So do files and batches, which are there if the administrator has named a folder.
    *(
        "DELETE /v1/files/{file_id}",
        "GET /v1/batches",
        "GET /v1/batches/{batch_id}",
        "GET /v1/files",
        "GET /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content",
        "POST /v1/batches",
        "POST /v1/batches/{batch_id}/cancel",
        "POST /v1/files",
    ),
    # The page: files without data.
    *(
        "GET /ui",
        "GET /ui/api.js",
        "GET /ui/chat.js",
        "GET /ui/dom.js",
        "GET /ui/engine.js",
        "GET /ui/icon.svg",
        "GET /ui/main.js",
        "GET /ui/markdown.js",
        "GET /ui/message.js",
        "GET /ui/metrics.js",
        "GET /ui/settings.js",
        "GET /ui/style.css",
    ),
    # Ollama's clients.
    *(
        "GET /api/ps",
        "GET /api/tags",
        "GET /api/version",
        "POST /api/chat",
        "POST /api/generate",
        "POST /api/show",
    ),
}
ELSEWHERE = (
    *(
        "/update_weights",
        "/update_weights_from_disk",
        "/load_lora_adapter",
        "/v1/load_lora_adapter",
    ),
    *("/server_info", "/get_server_info", "/start_profile", "/collective_rpc", "/sleep", "/pause"),
    *("/abort_requests", "/invocations", "/pooling", "/schema", "/schema/openapi.json", "/docs"),
    *("/static/x", "/debug", "/dump", "/test", "/generate"),
)


async def test_every_route_has_been_considered() -> None:
    async with serving() as server:
        routes = {
            f"{method} {route.path_format}"
            for route in server.context.app_instance.app.routes
            for method in getattr(route, "methods", ())
            if method != "OPTIONS"
        }
        assert routes == ROUTES
        for path in ELSEWHERE:
            for method in ("GET", "POST"):
                assert (await server.client.request(method, path)).status_code == 404, path


async def test_no_answer_holds_a_key() -> None:
    keys = {"api_key": ["sesame-of-users"], "admin_api_key": ["sesame-of-admins"]}
    async with serving(**keys) as server:
        headers = {"authorization": "Bearer sesame-of-users"}
        routes = {route.path for route in server.context.app_instance.app.routes}
        for path in sorted(routes):
            for method in ("GET", "POST"):
                url = path.replace("{name:path}", "x").replace("{id:path}", "server:x")
                answer = await server.client.request(method, url, headers=headers, content=b"{}")
                assert "sesame" not in answer.text + str(answer.headers), (method, path)


async def test_chunks_of_one_byte_are_a_body() -> None:
    """The bound is that of bytes; a chunk costs no more than its byte."""

    def chunked(body: bytes) -> bytes:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    async with serving(max_body_bytes=10_000) as server:
        fits = await server.raw(chunked(b" " * 9_000 + b'{"prompt":"a"}'))
        assert b" 200 " in fits[:20]
        try:
            large = await server.raw(chunked(b" " * 200_000))
        except ConnectionError:  # the server has hung up on the rest
            large = b""
        assert not large or b" 413 " in large[:20]
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data; boundary=b", b"--b\r\n" * 10_000 + b"--b--"),
        ("multipart/form-data; boundary=" + "-" * 60, b"-" * 100_000),
        ("multipart/form-data", b'content-disposition: form-data; name="prompt"'),
        ("application/x-www-form-urlencoded", b"&".join([b"prompt=a"] * 10_000)),
        ("application/msgpack", b"\x81\xa6prompt\xa1a"),
        ("application/x-yaml", b"!!python/object/apply:os.system ['true']"),
    ],
)
async def test_a_body_is_json_whatever_it_says_it_is(kind: str, body: bytes) -> None:
    async with serving() as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = await server.post(path, body, headers={"content-type": kind})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "invalid_json"
        odd = {"content-type": kind}
        assert (await server.post("/v1/completions", {"prompt": "a"}, headers=odd)).is_success


async def test_ranges_are_not_served() -> None:
    async with serving() as server:
        whole = await server.client.get("/v1/models")
        ranges = {"range": "bytes=" + ",".join(f"{i}-" for i in range(5_000))}
        part = await server.client.get("/v1/models", headers=ranges)
        assert (part.status_code, part.content) == (200, whole.content)


async def test_no_method_reaches_anything_but_its_route() -> None:
    methods = ["TRACE", "CONNECT", "PROPFIND", "get", "Post", "__class__", "ASGI", "DELETE", "PUT"]
    async with serving() as server:
        for method in methods:
            for path in ("/v1/models", "/v1/completions", "/plugins"):
                line = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                status = int((await server.raw(line.encode())).split()[1])
                assert 400 <= status < 500, (method, path)


@pytest.mark.parametrize(
    "name", ["127a0.0.1", "127.0.0x1", "localhost.evil", "xlocalhost", "local.ost"]
)
async def test_an_allowed_name_is_no_pattern(name: str) -> None:
    async with serving(allowed_hosts=["my.host", "loc.lhost"]) as server:
        for allowed in ("my.host", "loc.lhost", "localhost"):
            answer = await server.client.get("/v1/models", headers={"host": allowed})
            assert answer.status_code == 200
        for host in (name, "myxhost", "my.host.evil", "my.host,evil"):
            answer = await server.client.get("/v1/models", headers={"host": host})
            assert answer.status_code in (400, 403), host


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "a\\..\\b", "a/../../b", "%00"],
)
async def test_the_name_of_a_model_is_no_path(name: str) -> None:
    async with serving() as server:
        answer = await server.complete(model=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        url = httpx.URL(server.url + "/v1/models/").copy_with(
            raw_path=f"/v1/models/{name}".encode()
        )
        assert (await server.client.get(url)).status_code == 404


def test_a_decoder_has_no_state() -> None:
    """Threads that check good and bad bodies at once never take one for the other."""
    decoder = RequestDecoder(CompletionRequest, strict=True)
    good, bad = b'{"prompt":"a"}', b'{"prompt":"a","prompt_embeds":"AAAA"}'

    def check(number: int) -> bool:
        try:
            decoder.decode(bad if number % 2 else good)
        except APIError:
            return bool(number % 2)
        return not number % 2

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(check, range(4_000)))


async def test_requests_with_one_label_are_apart() -> None:
    async with serving() as server:
        headers = {"x-request-id": "the-same"}
        answers = await asyncio.gather(
            *(server.post("/v1/completions", {"prompt": "a"}, headers=headers) for _ in range(20))
        )
    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["id"] for a in answers}) == 20
