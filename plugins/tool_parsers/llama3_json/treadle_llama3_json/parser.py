"""Calls of Llama 3.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": …}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}

The format of Llama 3.1 to 3.3
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling). There
is nothing around a call that tells it from JSON which is an answer. So an object without a tag is a
call only where a line begins, with the keys of a call and the name of a tool of the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.incremental_json import BLANKS
from treadle_parsing_kit.json_calls import JsonToolCallReader
from treadle_parsing_kit.tool_call_parser import ToolCallParser
from treadle_parsing_kit.tool_choice import (
    ANYWHERE,
    BLANK,
    arguments_rule,
    arguments_schema,
    object_pattern,
    selected_tools,
    untagged_text_rules,
)

__all__ = ("Llama3",)

TAG = "<|python_tag|>"
KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})
_candidate = re.compile(r"[{<]")


class Llama3(ToolCallParser):
    special_tags = (TAG,)

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools
        self._names = frozenset(tool.name for tool in tools)
        self._fresh = (
            True  # nothing but blanks since the line began, or since a call that is broken
        )
        self._last = ""  # the last character that is no blank

    def emit_text(self, text: str) -> None:
        body = text.rstrip(BLANKS)
        if not body:
            self._fresh = self._fresh or "\n" in text
        else:
            before = body[:-1].rstrip(BLANKS)[-1:] or self._last
            self._fresh = "\n" in text[len(body) :] or before + body[-1] == "};"
            self._last = body[-1]
        super().emit_text(text)

    def read_text(self, text: str, pos: int) -> int:
        match = _candidate.search(text, pos)
        start = match.start() if match else len(text)
        self.emit_text(text[pos:start])
        if match is None:
            return start
        if text[start] == "{":
            if self._fresh:
                self.start_call(self._bare())
                return start
        elif (end := self.expect_tag(text, start, TAG)) is not None:
            if not self.pending:
                self.call_prefix.append(TAG)
                self.mode = self._tagged
            return end
        self.emit_text(text[start])
        return start + 1

    def _tagged(self, text: str, pos: int) -> int:
        if text[pos] == "{":
            self.start_call(JsonToolCallReader(self.calls))
            return pos
        if text[pos] not in BLANKS:
            return self.abandon_call(pos)
        self.call_prefix.append(text[pos])
        return pos + 1

    def read_after_call(self, text: str, pos: int) -> int:
        if text[pos] == "{":
            self.start_call(self._bare())
            return pos
        if text[pos] not in BLANKS and text[pos] != ";":
            return self.abandon_call(pos)
        self.call_prefix.append(text[pos])
        return pos + 1

    def _bare(self) -> JsonToolCallReader:
        return JsonToolCallReader(self.calls, self._names.__contains__, KEYS)

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        """One call. JSON without anything around it: every backend can enforce it."""
        if choice == "auto":
            return self._text_with_calls()
        calls: list[dict[str, Any]] = []
        shared: dict[str, Any] = {}
        for index, tool in enumerate(selected_tools(self._tools, choice)):
            schema = _moved(arguments_schema(tool), f"tool{index}-", shared)
            properties = {"name": {"type": "string", "enum": [tool.name]}, "parameters": schema}
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            )
        schema_document: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if shared:
            schema_document = {**schema_document, "$defs": shared}
        return GrammarSpec("json_schema", json.dumps(schema_document))

    def _text_with_calls(self) -> GrammarSpec:
        """Text in which an object where a call may begin, with the name of a tool or arguments, is a call."""
        calls = [
            (f'{{"name": "{tool.name}", "parameters": ', f'{arguments_rule(tool, "auto")} "}}"')
            for tool in self._tools
        ]
        rules = untagged_text_rules(
            object_pattern(self._tools),
            calls,
            before=rf"({ANYWHERE}(\n|\}}{BLANK}*;))?{BLANK}*",
            between=r"[; \t\r\n]*",
            tags=[TAG],
            tokenizer=self._tokenizer,
        )
        return GrammarSpec("ebnf", "\n".join(rules))


def _moved(schema: dict[str, Any], prefix: str, shared: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as a part of another: its definitions move to ``shared``, under other names."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy(item) for item in value]
        if not isinstance(value, dict):
            return value
        copied = {key: copy(item) for key, item in value.items()}
        target = copied.get("$ref")
        if isinstance(target, str):
            for section in ("#/$defs/", "#/definitions/"):
                if target.startswith(section):
                    copied["$ref"] = f"#/$defs/{prefix}{target.removeprefix(section)}"
        return copied

    result: dict[str, Any] = copy(schema)
    for section in ("$defs", "definitions"):
        definitions = result.pop(section, None)
        if isinstance(definitions, dict):
            shared |= {f"{prefix}{name}": value for name, value in definitions.items()}
    return result
