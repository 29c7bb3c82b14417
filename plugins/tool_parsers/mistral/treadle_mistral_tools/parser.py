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

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.incremental_json import BLANKS
from treadle_parsing_kit.json_calls import ArgumentsReader, is_name
from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat
from treadle_parsing_kit.tool_choice import (
    arguments_rule,
    free_text_rules,
    lark_string,
    names_one_tool,
    tag_rule,
    writable_tools,
)

__all__ = ("Mistral",)

CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ALPHABET = string.ascii_letters + string.digits
_name = re.compile(r"[^\s\[\]{}()\"',;]*")
_id = re.compile(r"[0-9A-Za-z]*")


class Mistral(JsonFamilyParser):
    format = JsonFormat(begin=(CALLS,), arrays=True, head="[", tail="]")
    special_tags = (CALLS, ID, ARGUMENTS)

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__(tokenizer, tools)
        self._word: list[str] = []
        self._name = ""
        self._tags: tuple[str, ...] = ()  # that may still come before the arguments

    def call_id(self) -> str:
        """Mistral's chat templates refuse any other id."""
        return "".join(secrets.choice(ALPHABET) for _ in range(9))

    def read_first(self, text: str, pos: int) -> int:
        if text[pos] not in "[{" and text[pos] not in BLANKS:
            self._word, self.mode = [], self._read_name
            return pos
        return super().read_first(text, pos)

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
            self.start_call(ArgumentsReader(self.calls, self._name))
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

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        """The form of the model's own generation, which its vocabulary tells: ``[ARGS]`` came with
        v11, and vocabularies without it were taught the array."""
        arguments = tag_rule(ARGUMENTS, self._tokenizer)
        if not arguments.startswith("<["):
            return super().grammar_for_tool_choice(choice)
        begin = tag_rule(CALLS, self._tokenizer)
        tools = writable_tools(self._tools, choice, lambda t: _name.fullmatch(t.name) is not None)
        if not tools:
            return None
        call_id = tag_rule(ID, self._tokenizer)
        own_id = f"({call_id} /[0-9A-Za-z]{{9}}/)?" if call_id.startswith("<[") else ""
        calls = " | ".join(f"call_{i}" for i in range(len(tools)))
        if choice == "auto":
            lines = free_text_rules(CALLS, f"({calls})", self._tokenizer)
        else:
            lines = ["start: call" if names_one_tool(choice) else "start: call+"]
            lines.append(f"call: {begin} ({calls})")
        for i, tool in enumerate(tools):
            lines += [
                f"call_{i}: {lark_string(tool.name)} {own_id} {arguments} arguments_{i}",
                f"arguments_{i}: {arguments_rule(tool, choice)}",
            ]
        return GrammarSpec("ebnf", "\n".join(lines))
