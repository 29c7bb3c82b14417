"""Hermes calls.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The format of the Hermes models (https://github.com/NousResearch/Hermes-Function-Calling), which
Qwen 2.5 and 3 and many others were taught as well. Written loosely it is read all the same: several
objects in one block, and a block that the end of the output or the next one closes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.incremental_json import BLANKS
from treadle_parsing_kit.json_calls import JsonToolCallReader
from treadle_parsing_kit.tool_call_parser import ToolCallParser
from treadle_parsing_kit.tool_choice import (
    arguments_rule,
    lark_string,
    names_one_tool,
    selected_tools,
    tag_rule,
)

__all__ = ("Hermes",)

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(ToolCallParser):
    special_tags = (BEGIN, END)

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools

    def read_text(self, text: str, pos: int) -> int:
        end = self.find_tag(text, pos, BEGIN)
        if end < 0:
            return len(text)
        self.call_prefix.append(BEGIN)
        self.mode = self._object
        return end

    def _object(self, text: str, pos: int) -> int:
        if text[pos] == "{":
            self.start_call(JsonToolCallReader(self.calls))
            return pos
        if text[pos] not in BLANKS:
            return self.abandon_call(pos)
        self.call_prefix.append(text[pos])
        return pos + 1

    def read_after_call(self, text: str, pos: int) -> int:
        if text[pos] in BLANKS or text[pos] == "{":
            return self._object(text, pos)
        end = self.expect_tag(text, pos, END)
        if end is None:
            return self.abandon_call(pos)
        return end if self.pending else self.end_call(end)

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec:
        begin, end = tag_rule(BEGIN, self._tokenizer), tag_rule(END, self._tokenizer)
        tools = selected_tools(self._tools, choice)
        calls = " | ".join(f"call_{i}" for i in range(len(tools)))
        lines = [
            "start: block" if names_one_tool(choice) else 'start: block ("\\n" block)*',
            f'block: {begin} "\\n" ({calls}) "\\n" {end}',
        ]
        for i, tool in enumerate(tools):
            head = lark_string(f'{{"name": {lark_string(tool.name)}, "arguments": ')
            lines += [
                f'call_{i}: {head} arguments_{i} "}}"',
                f"arguments_{i}: {arguments_rule(tool)}",
            ]
        return GrammarSpec("ebnf", "\n".join(lines))
