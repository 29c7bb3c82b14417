"""Constraints that are said with Python types."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest

from treadle import LLM, SamplingParams
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.errors import RequestError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.Enum):
    SMALL = 1


@dataclass
class Point:
    x: int


class Person(TypedDict):
    name: str


class Struct(msgspec.Struct):
    name: str


TYPES: list[tuple[Any, dict[str, Any]]] = [
    ({"type": "integer"}, {"json": {"type": "integer"}}),
    (int, {"json": {"type": "integer"}}),
    (list[bool], {"json": {"type": "array", "items": {"type": "boolean"}}}),
    (Literal["a", "b"], {"choice": ["a", "b"]}),
    (Literal["a", 1], {"json": {"enum": ["a", 1]}}),
    (Color, {"choice": ["red", "blue"]}),
    (Size, {"json": {"enum": [1]}}),
    (re.compile("a+"), {"regex": "a+"}),
]


@pytest.mark.parametrize(("given", "fields"), TYPES, ids=str)
def test_a_type_is_a_constraint(given: Any, fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=given)
    assert params.structured_outputs == StructuredOutputsParams(**fields)


@pytest.mark.parametrize("given", [Point, Person, Struct])
def test_classes_have_schemas(given: Any) -> None:
    constraint = SamplingParams(structured_outputs=given).structured_outputs
    assert constraint is not None and isinstance(constraint.json, dict)
    assert given.__name__ in json.dumps(constraint.json)


def test_models_of_pydantic() -> None:
    pydantic: Any = pytest.importorskip("pydantic")
    model = pydantic.create_model("City", name=(str, ...))
    for given in (model, list[model]):  # type: ignore[valid-type]
        constraint = SamplingParams(structured_outputs=given).structured_outputs
        assert constraint is not None and "City" in json.dumps(constraint.json)


def test_limits_of_pydantic_are_kept() -> None:
    pydantic: Any = pytest.importorskip("pydantic")
    small = Annotated[int, pydantic.Field(ge=3)]
    known = make_dataclass("known", [("x", small)])
    for given in (small, list[small], small | None, pydantic.conint(ge=3), known):  # type: ignore[valid-type]
        constraint = SamplingParams(structured_outputs=given).structured_outputs
        assert constraint is not None and '"minimum": 3' in json.dumps(constraint.json)


def test_flags_of_patterns_are_kept() -> None:
    for given, regex in (
        (re.compile("a", re.IGNORECASE), "(?i)a"),
        (re.compile("(?i)a"), "(?i)a"),
        (re.compile("a.b", re.DOTALL | re.MULTILINE), "(?ms)a.b"),
        (re.compile(r"\d"), r"\d"),
    ):
        assert SamplingParams(structured_outputs=given).structured_outputs == (
            StructuredOutputsParams(regex=regex)
        )


def test_types_of_outlines() -> None:
    """The package need not be there: what has the name and the attribute of one is one."""

    def made(name: str, **values: Any) -> Any:
        return type(name, (), {"__module__": "outlines.types.dsl", **values})()

    cases = {
        made("Regex", pattern="a"): {"regex": "a"},
        made("CFG", definition="start: A"): {"grammar": "start: A"},
        made("JsonSchema", schema='{"type": "null"}'): {"json": '{"type": "null"}'},
        made("Choice", items=["x"]): {"choice": ["x"]},
        made("Choice", items=[1]): {"json": {"enum": [1]}},
    }
    for given, fields in cases.items():
        constraint = SamplingParams(structured_outputs=given).structured_outputs
        assert constraint == StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    "given",
    ["[a-z]", object(), lambda: 1, re.compile(b"a")],
    ids=["text", "object", "function", "bytes"],
)
def test_what_is_no_type(given: Any) -> None:
    with pytest.raises(RequestError, match="has no JSON schema") as error:
        SamplingParams(structured_outputs=given)
    assert error.value.param == "structured_outputs"


def test_an_output_obeys_its_type() -> None:
    with LLM(model="demo:treadle-demo", num_pages=32) as llm:
        params = SamplingParams(structured_outputs=Literal["left", "right"], max_tokens=8)
        (output,) = llm.generate(["Go"], params, use_tqdm=False)
        assert output.outputs[0].text in ("left", "right") and output.unenforced is None
        schema = {"type": "string", "format": "color", "maxLength": 3}
        params = SamplingParams(structured_outputs=schema, max_tokens=16)
        (output,) = llm.generate(["Go"], params, use_tqdm=False)
        assert output.unenforced == "the format color at $"
