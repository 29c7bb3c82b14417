"""Generators of outlines over an ``LLM``, as its documentation writes them."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import treadle
from treadle.errors import RequestError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    outlines = pytest.importorskip("outlines")

from outlines.inputs import Chat
from outlines.types import CFG, JsonSchema, Regex

from treadle.compat.outlines import from_treadle


class Person(BaseModel):
    name: Literal["Ada", "Alan"]
    age: int


@pytest.fixture(scope="module")
def model() -> Any:
    with treadle.LLM("demo:treadle-demo") as llm:
        yield from_treadle(llm)


@pytest.mark.parametrize(
    ("output_type", "pattern"),
    [
        (Literal["left", "right"], "left|right"),
        (int, r"(0|[+-]?[1-9]\d*)"),
        (Regex("[0-9]{4}"), r"\d{4}"),
        (outlines.types.date, r"\d{4}-\d{2}-\d{2}"),
        (CFG('start: "a" | "b" start'), "b*a"),
        (JsonSchema('{"type": "array", "items": {"type": "boolean"}, "maxItems": 1, "minItems": 1}'), r"\[\s*(true|false)\s*\]"),
    ],
    ids=range(6),
)  # fmt: skip
def test_output_types(model: Any, output_type: Any, pattern: str) -> None:
    generator = outlines.Generator(model, output_type)
    assert re.fullmatch(pattern, generator("Say it.", max_tokens=40, temperature=0.0))


def test_models_batches_and_several_outputs(model: Any) -> None:
    generator = outlines.Generator(model, Person)
    params = treadle.SamplingParams(max_tokens=60, temperature=0.0)
    text = generator("Who?", sampling_params=params)
    assert json.loads(text)["name"] in ("Ada", "Alan")
    assert generator.batch(["Who?", "And who?"], sampling_params=params)[0] == [text]
    assert generator.batch([]) == []
    many = model("Who?", Literal["yes", "no"], n=2, temperature=1.0, seed=1)
    assert len(many) == 2 and set(many) <= {"yes", "no"}


def test_streams_chats_and_free_text(model: Any) -> None:
    chat = Chat([{"role": "user", "content": "Say it."}])
    options = {"max_tokens": 12, "temperature": 0.0}
    assert (
        "".join(model.stream(chat, **options))
        == model(chat, **options)
        == model("Say it.", **options)
    )
    generator = outlines.Generator(model, Regex("[0-9]{4}"))
    assert "".join(generator.stream(chat, **options)) == generator(chat, **options)


def test_what_is_wrong_says_so(model: Any) -> None:
    with pytest.raises(RequestError, match="max_length is no sampling parameter"):
        model("Say it.", max_length=3)
    with pytest.raises(RequestError, match="a stream has one output"):
        model.stream("Say it.", n=2)
    with pytest.raises(RequestError, match="grammar"):
        model("Say it.", CFG("start: missing"), max_tokens=3)
    with pytest.raises(TypeError, match="input type"):
        model(3)
