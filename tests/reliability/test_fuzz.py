"""A short run of ``fuzz.py``: nothing that a client sends costs more than its own request."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path

import pytest
from fragments import FRAGMENTS
from fuzz import MODEL, OPTIONS, fuzz, requests_of
from generator import ENCODED_HOLE, Generator
from process import served
from repository import ROOT

pytestmark = pytest.mark.own_python

DOCUMENT = json.loads((ROOT / "docs" / "ref" / "openapi.json").read_text())
COUNT = 400


def test_every_request_is_answered_and_disturbs_no_other(tmp_path: Path) -> None:
    with served(MODEL, tmp_path / "log", *OPTIONS) as server:
        document = server.client.get("/openapi.json").json()
        report = asyncio.run(fuzz(server, requests_of(Generator(document, seed=1), COUNT)))
    assert report.faults == [], report
    assert report.statuses.total() > COUNT
    assert report.statuses[200] > COUNT / 3 and report.statuses[400] > COUNT / 3


def test_every_field_of_every_body_gets_a_fragment() -> None:
    """A field that is added to the API is fuzzed without being named anywhere."""
    fields = {request.name.partition(":")[0] for request in Generator(DOCUMENT, 1).fields()}
    schemas = DOCUMENT["components"]["schemas"]
    num_bodies = 0
    for path, operations in DOCUMENT["paths"].items():
        if "requestBody" in operations.get("post", {}):
            content = operations["post"]["requestBody"]["content"]["application/json"]
            name = content["schema"]["$ref"].rpartition("/")[2]
            num_bodies += 1
            assert {f"{path} {field}" for field in schemas[name]["properties"]} <= fields
    assert num_bodies >= 4 and len(fields) < COUNT


def test_nested_places_are_found() -> None:
    names = {name for _, name, _ in Generator(DOCUMENT, 1).holes}
    assert names >= {
        *("the body", "a key", "unknown 'metadata'", "messages[0].content[0].text"),
        *("tools[0].function.parameters.properties.a.enum", "logit_bias as key", "logit_bias.*"),
        *("response_format.json_schema.schema.$ref", "guided_json.maxLength", "stop[0]"),
        *("structured_outputs.choice[1]", "chat_template_kwargs.*.*", "documents[0].*"),
        *("messages[0].tool_calls[0].function.arguments", "stream_options.include_usage"),
        *("tool_choice.function.name", "extra_args.*", "tokens[0]", "prompt[0][0]"),
    }


def test_a_fragment_is_all_that_is_wrong_with_a_body() -> None:
    for _, name, template in Generator(DOCUMENT, 1).holes:
        assert template.count(ENCODED_HOLE) == 1, name
        json.loads(template.replace(ENCODED_HOLE, b'"a"'))
    assert len(FRAGMENTS) == len(set(FRAGMENTS.values()))


def test_a_seed_names_the_requests() -> None:
    first, again, other = (
        list(islice(Generator(DOCUMENT, seed).requests(), 50)) for seed in (1, 1, 2)
    )
    assert first == again != other
