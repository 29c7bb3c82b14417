"""A reasoning parser that fails where a grammar waits for it costs that request, in the engine too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from engines import MODEL, finish, healthy

from treadle import LLM
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.errors import RequestError

PLUGIN = """
from treadle.api import impl

TREADLE = {"reasoning_parsers": ["faulty"]}


class Panic(BaseException):
    pass


class Thinks:
    def __init__(self, options, prompt):
        self.options, self.steps = options, 0
        self.starts = options["method"] != "opening_tag"

    def answer(self, method, good):
        if self.options["method"] != method:
            return good
        match self.options["failure"]:
            case "raise":
                raise KeyError("odd")
            case "panic":
                raise Panic("odd")
            case "number":
                return 5

    @property
    def in_reasoning(self):
        return self.answer("in_reasoning" if not self.steps else "in_reasoning later", self.starts)

    @property
    def opening_tag(self):
        return self.answer("opening_tag", None)

    def feed(self, text, ids):
        self.steps += 1
        return self.answer("feed", [])

    def finish(self):
        return []


@impl
def treadle_reasoning_parser(name, prompt, options):
    return Thinks(options, prompt)
"""
STRUCTURED = {
    "structured_outputs": StructuredOutputsParams(regex="[a-z]+", reasoning="faulty"),
    "ignore_eos": False,
}


@pytest.mark.fault("reasoning_parsers", "in_reasoning", "opening_tag", "feed")
@pytest.mark.parametrize(
    ("method", "failure", "cause"),
    [
        ("in_reasoning", "raise", "failed in in_reasoning: KeyError: 'odd'"),
        ("in_reasoning", "panic", "failed in in_reasoning: Panic: odd"),
        ("opening_tag", "raise", "failed in opening_tag: KeyError: 'odd'"),
        (
            "opening_tag",
            "number",
            "failed in opening_tag: TypeError: it returned 5; a str or None was expected",
        ),
        ("feed", "raise", "failed in feed: KeyError: 'odd'"),
        ("feed", "panic", "failed in feed: Panic: odd"),
        ("in_reasoning later", "raise", "failed in in_reasoning: KeyError: 'odd'"),
    ],
)
def test_where_a_grammar_waits_the_request_pays(
    method: str, failure: str, cause: str, tmp_path: Path, expected: list[int]
) -> None:
    file = tmp_path / "faulty_reasoning.py"
    file.write_text(PLUGIN)
    options = {"reasoning_parsers:faulty": {"method": method, "failure": failure}}
    settings: dict[str, Any] = {"model": MODEL, "cpu_threads": 1, "num_pages": 64, "device": "cpu"}
    with LLM(plugin_file=[str(file)], plugin_options=options, **settings) as llm:
        try:
            message = finish(llm, STRUCTURED)[0].error
        except RequestError as error:
            message = str(error)
        assert (
            message is not None and cause in message and "reasoning_parsers:faulty from" in message
        )
        row = ("reasoning_parsers:faulty", re.findall(r"failed in (\w+)", message)[0], "error", 1)
        assert row in llm.stats.plugin_calls
        healthy(llm, expected)
