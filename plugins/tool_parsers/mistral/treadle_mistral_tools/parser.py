"""Calls of Mistral's models.

::

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, …]
    [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]…
    [TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}[TOOL_CALLS]…

The first is the format of the tokenizers up to v7, the others are of v11 and v13
(https://github.com/mistralai/mistral-common, ``tokens/tokenizers/instruct.py``). All are read,
whatever the model.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.parsers import Delta, ToolCallDelta
from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.incremental_json import BLANKS, IncrementalJson
from treadle_parsing_kit.json_calls import JsonToolCallReader, is_name
from treadle_parsing_kit.tool_call_parser import ToolCallParser
from treadle_parsing_kit.tool_choice import (
    arguments_rule,
    lark_string,
    names_one_tool,
    selected_tools,
    tag_rule,
)

__all__ = ("Mistral",)

CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ALPHABET = string.ascii_letters + string.digits
_name = re.compile(r"[^\s\[\]{}()\"',;]*")
_id = re.compile(r"[0-9A-Za-z]*")


class Mistral(ToolCallParser):
    special_tags = (CALLS, ID, ARGUMENTS)

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools
        self._array = self._comma = False
        self._word: list[str] = []
        self._name = ""
        self._tags: tuple[str, ...] = ()  # that may still come before the arguments

    def call_id(self) -> str:
        """Mistral's chat templates refuse any other id."""
        return "".join(secrets.choice(ALPHABET) for _ in range(9))

    def read_text(self, text: str, pos: int) -> int:
        end = self.find_tag(text, pos, CALLS)
        if end < 0:
            return len(text)
        self.call_prefix.append(CALLS)
        self.mode, self._array, self._comma = self._read_first, False, True
        return end

    def _read_first(self, text: str, pos: int) -> int:
        """Behind ``[TOOL_CALLS]``."""
        if text[pos] == "[":
            self._array, self.mode = True, self._read_item
        elif text[pos] == "{":
            return self._read_item(text, pos)
        elif text[pos] not in BLANKS:
            self._word, self.mode = [], self._read_name
            return pos
        self.call_prefix.append(text[pos])
        return pos + 1

    def _read_item(self, text: str, pos: int) -> int:
        if text[pos] == "{":
            self.start_call(JsonToolCallReader(self.calls))
            self._comma = False
            return pos
        if text[pos] not in BLANKS:
            return self.abandon_call(pos)
        self.call_prefix.append(text[pos])
        return pos + 1

    def read_after_call(self, text: str, pos: int) -> int:
        char = text[pos]
        if not self._array or char == "]":
            return self.end_call(pos + int(self._array))
        if char == "," and not self._comma:
            self._comma = True
        elif char not in BLANKS:
            return self._read_item(text, pos) if self._comma else self.abandon_call(pos)
        self.call_prefix.append(char)
        return pos + 1

    def _read_name(self, text: str, pos: int) -> int:
        """The name of a function, as it comes."""
        end = self._read_word(_name, text, pos)
        if end < len(text):
            self._name = "".join(self._word)
            if not is_name(self._name):
                return self.abandon_call(end)
            self._tags, self.mode = (ID, ARGUMENTS), self._read_tags
        return end

    def _read_tags(self, text: str, pos: int) -> int:
        """Between the name and the arguments."""
        if text[pos] == "{":
            self.start_call(_Arguments(self.calls, self._name))
            return pos
        if text[pos] in BLANKS:
            self.call_prefix.append(text[pos])
            return pos + 1
        partial = False
        for index, tag in enumerate(self._tags):
            end = self.expect_tag(text, pos, tag)
            if end is not None and not self.pending:
                self.call_prefix.append(tag)
                self._tags = self._tags[index + 1 :]
                if tag == ID:
                    self.mode = self._read_id
                return end
            partial = partial or end is not None
        return len(text) if partial else self.abandon_call(pos)

    def _read_id(self, text: str, pos: int) -> int:
        """The id that the model gave its call. Clients get one of ``call_id``."""
        end = self._read_word(_id, text, pos)
        if end < len(text):
            self.mode = self._read_tags
        return end

    def _read_word(self, pattern: re.Pattern[str], text: str, pos: int) -> int:
        match = pattern.match(text, pos)
        end = pos if match is None else match.end()
        self._word.append(text[pos:end])
        self.call_prefix.append(text[pos:end])
        return end

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec:
        """The form of the model's own generation, which its vocabulary tells: ``[ARGS]`` came with
        v11, and vocabularies without it were taught the array."""
        tools = selected_tools(self._tools, choice)
        begin = tag_rule(CALLS, self._tokenizer)
        arguments = tag_rule(ARGUMENTS, self._tokenizer)
        calls = " | ".join(f"call_{i}" for i in range(len(tools)))
        is_single = names_one_tool(choice)
        if arguments.startswith("<["):
            lines = ["start: call" if is_single else "start: call+", f"call: {begin} ({calls})"]
            heads = [f"{lark_string(tool.name)} {arguments}" for tool in tools]
            tail = ""
        else:
            repetition = "" if is_single else ' (", " call)*'
            lines = [f'start: {begin} "[" call{repetition} "]"', f"call: {calls}"]
            heads = [lark_string(f'{{"name": {lark_string(t.name)}, "arguments": ') for t in tools]
            tail = ' "}"'
        for i, (tool, head) in enumerate(zip(tools, heads, strict=True)):
            lines += [
                f"call_{i}: {head} arguments_{i}{tail}",
                f"arguments_{i}: {arguments_rule(tool)}",
            ]
        return GrammarSpec("ebnf", "\n".join(lines))


class _Arguments:
    """A ``ToolCallReader`` of the arguments of a call whose name stands before them."""

    def __init__(self, index: int, name: str) -> None:
        self._index = index
        self._name: str | None = name
        self._value = IncrementalJson()
        self.begun = self.done = self.failed = False

    @property
    def rest(self) -> str:
        return self._value.pending

    def feed(self, text: str, pos: int = 0) -> tuple[int, list[Delta]]:
        pos = self._value.feed(text, pos)
        self.begun = True
        self.done, self.failed = self._value.done, self._value.failed
        return pos, self._take_deltas(self._value.pop_output())

    def finish(self) -> list[Delta]:
        return self._take_deltas(self._value.close())

    def _take_deltas(self, text: str) -> list[Delta]:
        if not text:
            return []
        name, self._name = self._name, None
        return [ToolCallDelta(self._index, name, text)]
