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

TREADLE = {"reasoning": ["faulty"]}


class Panic(BaseException):
    pass


class Thinks:
    def __init__(self, options, prompt):
        self.options, self.steps = options, 0
        self.starts = options["where"] != "opener"

    def said(self, where, good):
        if self.options["where"] != where:
            return good
        match self.options["how"]:
            case "raise":
                raise KeyError("odd")
            case "panic":
                raise Panic("odd")
            case "number":
                return 5

    @property
    def open(self):
        return self.said("open" if not self.steps else "open later", self.starts)

    @property
    def opener(self):
        return self.said("opener", None)

    def feed(self, text, ids):
        self.steps += 1
        return self.said("feed", [])

    def finish(self):
        return []


@impl
def treadle_reasoning_parser(name, prompt, options):
    return Thinks(options, prompt)
"""
GUIDED = {
    "guided": StructuredOutputsParams(regex="[a-z]+", reasoning="faulty"),
    "ignore_eos": False,
}


@pytest.mark.fault("reasoning", "open", "opener", "feed")
@pytest.mark.parametrize(
    ("where", "how", "cause"),
    [
        ("open", "raise", "failed in open: KeyError: 'odd'"),
        ("open", "panic", "failed in open: Panic: odd"),
        ("opener", "raise", "failed in opener: KeyError: 'odd'"),
        (
            "opener",
            "number",
            "failed in opener: TypeError: it returned 5; a str or None was expected",
        ),
        ("feed", "raise", "failed in feed: KeyError: 'odd'"),
        ("feed", "panic", "failed in feed: Panic: odd"),
        ("open later", "raise", "failed in open: KeyError: 'odd'"),
    ],
)
def test_where_a_grammar_waits_the_request_pays(
    where: str, how: str, cause: str, tmp_path: Path, expected: list[int]
) -> None:
    file = tmp_path / "faulty_reasoning.py"
    file.write_text(PLUGIN)
    options = {"reasoning_parsers:faulty": {"where": where, "how": how}}
    settings: dict[str, Any] = {"model": MODEL, "cpu_threads": 1, "num_pages": 64, "device": "cpu"}
    with LLM(plugin_file=[str(file)], plugin_options=options, **settings) as llm:
        try:
            said = finish(llm, GUIDED)[0].error
        except RequestError as error:
            said = str(error)
        assert said is not None and cause in said and "reasoning_parsers:faulty from" in said
        row = ("reasoning_parsers:faulty", re.findall(r"failed in (\w+)", said)[0], "error", 1)
        assert row in llm.stats.plugin_calls
        healthy(llm, expected)
