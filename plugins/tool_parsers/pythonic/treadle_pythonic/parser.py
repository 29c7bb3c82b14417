"""Calls written in Python.

::

    [get_weather(city="Paris", days=3), get_time()]
    <|python_start|>[get_weather(city="Paris")]<|python_end|>

The format of Llama 3.2 and 4 (with and without the tags,
https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/) and of ToolACE. A list without a
tag is one of calls only if it names tools of the request: ``[see below](#b)`` is text.

Texts in arguments stream as they come. A call without one is handed on when it is complete, for until
then nobody can say that it is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.incremental_json import BLANKS
from treadle_parsing_kit.json_calls import is_name
from treadle_parsing_kit.tool_call_parser import ToolCallParser
from treadle_pythonic.grammar import python_grammar, text_with_lists
from treadle_pythonic.keywords import Keywords

__all__ = ("Pythonic",)

START, END = "<|python_start|>", "<|python_end|>"
_candidate = re.compile(r"[\[<]")
_sibling = re.compile(r"[\[<,]")
_name = re.compile(r"[\w.\-]*")


class Pythonic(ToolCallParser):
    special_tags = (START, END)

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools
        self._names = frozenset(tool.name for tool in tools)
        self._tagged = self._comma = self._is_broken = False
        self._word: list[str] = []
        self.expect_openers("[<,")

    def read_text(self, text: str, pos: int) -> int:
        match = (_sibling if self._is_broken else _candidate).search(text, pos)
        start = match.start() if match else len(text)
        self.emit_text(text[pos:start])
        if match is None:
            return start
        if text[start] in "[,":
            self.call_prefix.append(text[start])
            self._tagged, self.mode = False, self._item
            return start + 1
        end = self.expect_tag(text, start, START)
        if end is None:
            self.emit_text(text[start])
            return start + 1
        if not self.pending:
            self.call_prefix.append(START)
            self._tagged, self.mode = True, self._list
        return end

    def _list(self, text: str, pos: int) -> int:
        """Behind the tag."""
        if text[pos] == "[":
            self.mode = self._item
        elif text[pos] not in BLANKS:
            return self.abandon_call(pos)
        self.call_prefix.append(text[pos])
        return pos + 1

    def _item(self, text: str, pos: int) -> int:
        """Before the name of a function."""
        if text[pos] not in BLANKS:
            self._word, self.mode = [], self._read_name
            return pos
        self.call_prefix.append(text[pos])
        return pos + 1

    def _read_name(self, text: str, pos: int) -> int:
        match = _name.match(text, pos)
        end = pos if match is None else match.end()
        self._word.append(text[pos:end])
        self.call_prefix.append(text[pos:end])
        if end < len(text):
            name = "".join(self._word)
            is_known = is_name(name) if self._tagged else name in self._names
            if text[end] != "(" or not is_known:
                return self.abandon_call(end)
            self._comma = False
            self.start_call(Keywords(self.calls, name))
        return end

    def recover(self, pos: int) -> int:
        """Behind a comma there may be a call again."""
        self._is_broken = True
        return self.abandon_call(pos)

    def read_after_call(self, text: str, pos: int) -> int:
        self._is_broken = False
        char = text[pos]
        if char == "]":
            self.call_prefix.append(char)
            self.mode = self._closed
        elif char == "," and not self._comma:
            self._comma = True
            self.call_prefix.append(char)
        elif char in BLANKS:
            self.call_prefix.append(char)
        elif self._comma:
            return self._item(text, pos)
        else:
            return self.abandon_call(pos)
        return pos + 1

    def _closed(self, text: str, pos: int) -> int:
        """Behind the list: the tag that ends it, if one began it."""
        end = self.expect_tag(text, pos, END) if self._tagged else None
        if end is None:
            return self.end_call(pos)
        return end if self.pending else self.end_call(end)

    def finish(self) -> list[Any]:
        if self.mode == self._closed:
            self.pending = ""
            self.end_call(0)
        return super().finish()

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        if choice == "auto":
            return text_with_lists(self._tools, self._tokenizer, START, END)
        return python_grammar(self._tools, choice)
