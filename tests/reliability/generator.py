"""Requests made from the OpenAPI document, so that a new field is covered without being named here."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote_from_bytes

from fragments import FRAGMENTS, KEYWORDS

__all__ = ("GeneratedRequest", "Generator")

HOLE = "a-hole-for-a-fragment"
ENCODED_HOLE = json.dumps(HOLE).encode()
DEPTH = 6
"""Levels of objects and arrays in a field, below which nothing gets a fragment of its own."""

# Few tokens, so that what is accepted costs little.
BASE: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "What is 2+2?"}],
    "prompt": "The capital of France is",
    "input": "What is 2+2?",
    "tokens": [1, 2, 3],
    "max_tokens": 2,
    "max_completion_tokens": 2,
}
# Values that any request may have, together: what is made of these alone must be answered with 200.
SOUND: Mapping[str, tuple[Any, ...]] = {
    "stream": (True, False),
    "max_tokens": (1, 2, 5),
    "temperature": (0, 0.7, 2.0),
    "top_p": (0.1, 1.0),
    "top_k": (-1, 1, 40),
    "min_p": (0.0, 0.3),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (0, 2),
    "seed": (0, 7, 2**63 - 1),
    "n": (1, 2),
    "stop": ("a", ["\n", "."], []),
    "stop_token_ids": ([5], []),
    "ignore_eos": (True,),
    "logit_bias": ({"3": -100}, {}),
    "bad_words": (["the"],),
    "user": ("somebody", "\0"),
    "cache_salt": ("a", "b"),
    "skip_special_tokens": (False,),
    "include_stop_str_in_output": (True,),
    "return_token_ids": (True,),
    "priority": (0,),
    "add_special_tokens": (True, False),
    "chat_template_kwargs": ({"a": [1, {"b": None}]}, {}),
    "return_token_strs": (True,),
}
CONSTRAINTS: tuple[Mapping[str, Any], ...] = (
    {"guided_choice": ["yes", "no"]},
    {"guided_regex": "[ab]{1,3}"},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
)
SINGLE_OUTPUT = frozenset({"/v1/messages", "/v1/messages/count_tokens", "/v1/responses"})
"""Routes whose answer is one output."""
UNKNOWN = ("metadata", "extra", "store", "functions", "vllm_xargs", "chat_template", "a b\n")
ROUTES_WITHOUT_BODY = ("/health", "/metrics", "/plugins", "/ready", "/v1/models", "/version", "/x")


@dataclass(frozen=True)
class GeneratedRequest:
    """One request; ``name`` says what is odd about it, ``""`` if nothing is."""

    method: str
    path: str
    body: bytes
    name: str = ""


class Generator:
    """Makes requests for one OpenAPI document. The same seed makes the same requests."""

    def __init__(self, document: Mapping[str, Any], seed: int) -> None:
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]
        self._bodies = {
            path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operations in sorted(document["paths"].items())
            if "requestBody" in operations.get("post", {})
        }
        # A batch needs a file that was uploaded before.
        self._sound_paths = [
            path
            for path, schema in self._bodies.items()
            if set(self._resolve(schema).get("required", ())) <= BASE.keys()
        ]
        self._random = random.Random(seed)

    @cached_property
    def holes(self) -> list[tuple[str, str, bytes]]:
        """Every place of every body that a fragment may stand in: path, name, JSON with a hole."""
        return [
            (path, name, json.dumps(value).encode())
            for path, schema in self._bodies.items()
            for name, value in self._in_body(self._resolve(schema))
        ]

    def fields(self) -> Iterator[GeneratedRequest]:
        """Yield one request for each field of each body, with some fragment in it."""
        for path, name, template in self.holes:
            if name.isidentifier():
                yield self._filled(path, name, template)

    def everything(self) -> Iterator[GeneratedRequest]:
        """Yield each fragment in each place. There are many thousands."""
        for path, name, template in self.holes:
            for fragment in FRAGMENTS:
                yield self._filled(path, name, template, fragment)

    def requests(self) -> Iterator[GeneratedRequest]:
        """Yield requests for ever: sound ones, others with a fragment, some without a body."""
        while True:
            choice = self._random.random()
            if choice < 0.35:
                yield self.sound()
            elif choice < 0.95:
                yield self._filled(*self._random.choice(self.holes))
            else:
                yield self._elsewhere()

    def sound(self) -> GeneratedRequest:
        """Return a request that the server must answer with 200."""
        path = self._random.choice(self._sound_paths)
        properties = self._resolve(self._bodies[path])["properties"]
        body = base_of(properties)
        if path == "/tokenize":
            body.pop(self._random.choice(["prompt", "messages"]))
        for field in self._random.sample(sorted(SOUND), 4):
            if field in properties:
                body[field] = self._random.choice(SOUND[field])
        if "n" in body and path in SINGLE_OUTPUT:
            body["n"] = 1
        if "guided_choice" in properties and self._random.random() < 0.2:
            body |= self._random.choice(CONSTRAINTS)
        return GeneratedRequest("POST", path, json.dumps(body).encode())

    def _filled(
        self, path: str, name: str, template: bytes, fragment: str | None = None
    ) -> GeneratedRequest:
        fragment = fragment or self._random.choice(list(FRAGMENTS))
        body = template.replace(ENCODED_HOLE, FRAGMENTS[fragment])
        return GeneratedRequest("POST", path, body, f"{path} {name}: {fragment}")

    def _elsewhere(self) -> GeneratedRequest:
        """Return a request of another method, path or body than the routes expect."""
        kind = self._random.randrange(4)
        fragment = self._random.choice(list(FRAGMENTS))
        data = FRAGMENTS[fragment]
        if kind == 0:
            path = "/v1/models/" + quote_from_bytes(data[:200], safe="")
            return GeneratedRequest("GET", path, b"", f"GET a model: {fragment}")
        if kind == 1:
            method = self._random.choice(["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
            path = self._random.choice(list(self._bodies))
            return GeneratedRequest(method, path, data, f"{method} {path}: {fragment}")
        if kind == 2:
            path = f"/plugins/{quote_from_bytes(data[:100], safe='')}/reload"
            return GeneratedRequest("POST", path, b"", f"reload: {fragment}")
        path = self._random.choice(ROUTES_WITHOUT_BODY)
        return GeneratedRequest("GET", path, b"", f"GET {path}")

    # -- schemas ---------------------------------------------------------------------

    def _in_body(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the places of a whole body: each field, unknown ones, and the body itself."""
        properties = schema["properties"]
        base = base_of(properties)
        if {"prompt", "messages"} <= properties.keys():
            del base["messages"]
        yield "the body", HOLE
        yield "a key", base | {HOLE: 1}
        for unknown in UNKNOWN:
            yield f"unknown {unknown!r}", base | {unknown: HOLE}
        for field, inner in properties.items():
            for name, value in self._places(inner, DEPTH):
                body = base | {field: value}
                if field == "messages":
                    body.pop("prompt", None)
                yield field + name, body

    def _places(self, schema: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
        """Yield values of ``schema`` with a hole in one place, and the name of the place."""
        yield "", HOLE
        if not depth:
            return
        for option in map(self._resolve, schema.get("oneOf", [schema])):
            own = self._minimal(option)
            for field, inner in option.get("properties", {}).items():
                for name, value in self._places(inner, depth - 1):
                    yield f".{field}{name}", own | {field: value}
            if "items" in option:
                for name, value in self._places(option["items"], depth - 1):
                    yield f"[0]{name}", [value]
                yield "[1]", [self._minimal(option["items"]), HOLE]
            if "additionalProperties" in option:
                yield " as key", {HOLE: 1}
                inner = option["additionalProperties"]
                if inner:
                    for name, value in self._places(inner, depth - 1):
                        yield f".*{name}", {"a": value}
                else:
                    yield from self._in_any_object()

    @staticmethod
    def _in_any_object() -> Iterator[tuple[str, Any]]:
        """Yield the places of an object of any form, which may be a JSON schema."""
        yield ".*", {"a": HOLE}
        yield ".*.*", {"a": {"b": [HOLE]}}
        for keyword in KEYWORDS:
            yield f".{keyword}", {keyword: HOLE}
            inner = {"a": {keyword: HOLE}}
            yield f".properties.a.{keyword}", {"type": "object", "properties": inner}

    def _minimal(self, schema: Mapping[str, Any]) -> Any:
        schema = self._resolve(schema)
        if "oneOf" in schema:
            return self._minimal(schema["oneOf"][0])
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][-1]
        match schema.get("type"):
            case "object":
                required = schema.get("required", ())
                return {f: self._minimal(schema["properties"][f]) for f in required}
            case "array":
                return []
            case "string":
                return "a"
            case "integer" | "number":
                return 1
            case "boolean":
                return True
        return None

    def _resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


def base_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sound body of a schema. Where there is an ``input``, a ``prompt`` is something else."""
    left_out = {"max_completion_tokens"} | ({"prompt"} if "input" in properties else set())
    return {k: v for k, v in BASE.items() if k in properties and k not in left_out}
