"""``GET /openapi.json``: made from the handlers' types, and true of their answers."""

from __future__ import annotations

from typing import Any

import jsonschema
from serving import serving

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "logprobs": True, "return_token_ids": True},
    "/v1/completions": {"prompt": "ab", "logprobs": 1, "echo": True},
    "/tokenize": {"prompt": "ab", "return_token_strs": True},
    "/detokenize": {"tokens": [97]},
}


def schema_of(document: Any, content: Any) -> Any:
    schema = content["application/json"]["schema"]
    return {**schema, "components": document["components"]}


async def test_bodies_answers_and_errors_are_described() -> None:
    async with serving() as server:
        document = (await server.client.get("/openapi.json")).json()
        for path, body in BODIES.items():
            operation = document["paths"][path]["post"]
            jsonschema.validate(body, schema_of(document, operation["requestBody"]["content"]))
            for changes, status in (({}, "200"), ({"model": "none"}, "404"), ({"model": 1}, "400")):
                answer = await server.post(path, {**body, **changes})
                assert str(answer.status_code) == status, path
                content = operation["responses"][status]["content"]
                jsonschema.validate(answer.json(), schema_of(document, content))
        for path in ("/v1/models", "/v1/models/{name}", "/version", "/health", "/plugins"):
            answer = await server.client.get(path.replace("{name}", "scripted"))
            content = document["paths"][path]["get"]["responses"]["200"]["content"]
            jsonschema.validate(answer.json(), schema_of(document, content))


async def test_every_field_has_a_description_and_paths_are_sorted() -> None:
    async with serving() as server:
        document = (await server.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {"model", "temperature", "stop"} < schemas["ChatRequest"]["properties"].keys()
    assert [
        (name, field)
        for name, schema in schemas.items()
        for field, value in schema.get("properties", {}).items()
        if not value.get("description") and "$ref" not in value
    ] == []
    assert list(document["paths"]) == sorted(document["paths"])


async def test_the_document_is_behind_the_key() -> None:
    async with serving(api_key=["k"]) as server:
        assert (await server.client.get("/openapi.json")).status_code == 401
        answer = await server.client.get("/openapi.json", headers={"authorization": "Bearer k"})
    assert answer.json()["security"] == [{"key": []}]


async def test_an_empty_body_is_called_so() -> None:
    async with serving() as server:
        for path in BODIES:
            answer = await server.post(path, b"")
            assert (
                answer.status_code == 400 and "body is empty" in answer.json()["error"]["message"]
            )
