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


async def test_every_error_that_a_route_may_answer_with_is_described() -> None:
    """One of each kind: without a key, of a foreign host, with a body of another type, of no such name."""
    async with serving(api_key=["k"]) as server:
        key = {"authorization": "Bearer k"}
        document = (await server.client.get("/openapi.json", headers=key)).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                is_public = operation.get("security") == []
                answer = await server.client.request(method, path)
                assert (answer.status_code != 401) == is_public, (method, path)
                for headers in ({}, key, {"host": "elsewhere.example", **key}):
                    body = {"content": b"x"} if "requestBody" in operation else {}
                    gzip = {"content-encoding": "gzip"} if body else {}
                    answer = await server.client.request(
                        method, path, headers={**headers, **gzip}, **body
                    )
                    said = operation["responses"].get(str(answer.status_code))
                    assert said is not None, (method, path, answer.status_code, answer.text)
                    if answer.status_code >= 400 and method != "head":
                        schema = schema_of(document, said["content"])
                        jsonschema.validate(answer.json(), schema)


async def test_what_streams_and_metrics_are_is_described() -> None:
    """Each answer's content type is said once, with one charset at most."""
    async with serving() as server:
        document = (await server.client.get("/openapi.json")).json()
        requests = [("GET", "/metrics", None), ("GET", "/metrics", "application/openmetrics-text")]
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"):
            requests.append(("POST", path, None))
        body = {"messages": [USER], "input": "hi", "prompt": "hi", "stream": True, "max_tokens": 2}
        for method, path, accept in requests:
            known = document["paths"][path][method.lower()]
            fields = {}
            if method == "POST":
                reference = known["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                fields = document["components"]["schemas"][reference.split("/")[-1]]["properties"]
            own = {k: v for k, v in body.items() if k in fields}
            if "input" in own:
                del own["prompt"]
            headers = {"accept": accept} if accept else {}
            answer = await server.client.request(method, path, json=own or None, headers=headers)
            kind = answer.headers["content-type"]
            assert answer.status_code == 200, answer.text
            assert kind.split(";")[0] in known["responses"]["200"]["content"], (path, kind)
            assert kind.count("charset") <= 1, kind


async def test_an_empty_body_is_called_so() -> None:
    async with serving() as server:
        for path in BODIES:
            answer = await server.post(path, b"")
            assert (
                answer.status_code == 400 and "body is empty" in answer.json()["error"]["message"]
            )
