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

from treadle.api.callparser import CallParser
from treadle.api.calls import CallReader
from treadle.api.forcing import chosen, json_rule, mark, named, quoted
from treadle.api.jsontext import BLANKS
from treadle.api.types import GrammarSpec, Tokenizer, Tool

__all__ = ("Hermes",)

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(CallParser):
    tags = (BEGIN, END)

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools

    def text(self, text: str, at: int) -> int:
        behind = self.find(text, at, BEGIN)
        if behind < 0:
            return len(text)
        self.lead.append(BEGIN)
        self.mode = self._object
        return behind

    def _object(self, text: str, at: int) -> int:
        if text[at] == "{":
            self.call(CallReader(self.calls))
            return at
        if text[at] not in BLANKS:
            return self.give_up(at)
        self.lead.append(text[at])
        return at + 1

    def after(self, text: str, at: int) -> int:
        if text[at] in BLANKS or text[at] == "{":
            return self._object(text, at)
        behind = self.expect(text, at, END)
        if behind is None:
            return self.give_up(at)
        return behind if self.carry else self.end(behind)

    def grammar(self, choice: str | Mapping[str, Any]) -> GrammarSpec:
        begin, end = mark(BEGIN, self._tokenizer), mark(END, self._tokenizer)
        tools = chosen(self._tools, choice)
        calls = " | ".join(f"call_{i}" for i in range(len(tools)))
        lines = [
            "start: block" if named(choice) else 'start: block ("\\n" block)*',
            f'block: {begin} "\\n" ({calls}) "\\n" {end}',
        ]
        for i, tool in enumerate(tools):
            head = quoted(f'{{"name": {quoted(tool.name)}, "arguments": ')
            lines += [f'call_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: {json_rule(tool)}"]
        return GrammarSpec("ebnf", "\n".join(lines))
