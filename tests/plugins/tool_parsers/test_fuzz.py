"""Outputs put together from the pieces of every format, right and wrong, cut anywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import TextDelta, ToolCallDelta
from treadle.plugins import PluginManager
from treadle.testing.parsers import TOOLS, merge_adjacent
from treadle.testing.streams import CodePointTokenizer
from treadle_parsing_kit.incremental_json import IncrementalJson

WORDS = """<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID] <|python_start|>
<|python_end|> {"name":"f" {"name":"g"} "arguments":{ "parameters": {"x": "name" : f( g() x=1 y='é'
get_weather { } [ ] ( ) , ; : " ' \\ \\" \\n \\u00e9 \\ud800 1 -2.5e3 0 true null None tru a \x01
< </ </tool <| [TOOL"""
BEGINNINGS = [
    '<tool_call>\n{"name": "f", "arguments": {"x": ',
    '{"name": "f", "parameters": {',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}',
    "[TOOL_CALLS]f[ARGS]{",
    "[f(x=1), g(",
]
PIECES = [
    *WORDS.split(),
    *BEGINNINGS,
    *BEGINNINGS,
    " ",
    "\n",
    "text ",
    "}}",
    "}}</tool_call>",
    "}}]",
    ")]",
]
OUTPUTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
PLUGINS = PluginManager()


@pytest.mark.parametrize("key", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_any_output_is_parsed_the_same_in_any_pieces_and_nothing_is_lost(key: str) -> None:
    tokenizer: Any = CodePointTokenizer()

    def parsed(pieces: list[str]) -> list[Any]:
        parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=TOOLS)
        deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
        return merge_adjacent([*deltas, *parser.finish()])

    @settings(database=None)
    @given(OUTPUTS, st.lists(st.integers(0, 200), max_size=6))
    def check(output: str, places: list[int]) -> None:
        expected = parsed([output])
        edges = [0, *sorted(min(place, len(output)) for place in places), len(output)]
        assert parsed([output[a:b] for a, b in pairwise(edges)]) == expected
        assert parsed(list(output)) == expected
        tags = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=TOOLS).special_tags

        def without_tags(text: str) -> str:
            """Without tags, and without what the removal of tags makes of their pieces."""
            while any(tag in text for tag in tags):
                for tag in tags:
                    text = text.replace(tag, "")
            return text

        calls = [delta for delta in expected if isinstance(delta, ToolCallDelta)]
        if not calls:
            left = "".join(d.text for d in expected if isinstance(d, TextDelta))
            assert without_tags(left) == without_tags(output)
        for index, call in enumerate(calls):
            arguments = IncrementalJson()
            assert call.index == index and call.name and call.arguments.startswith("{")
            assert arguments.feed(call.arguments) == len(call.arguments)
            "".join((call.name, call.arguments)).encode()  # can be sent

    check()
