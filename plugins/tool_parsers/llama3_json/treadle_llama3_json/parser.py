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

from treadle.api.callparser import CallParser
from treadle.api.calls import CallReader
from treadle.api.forcing import chosen, schema_of
from treadle.api.jsontext import BLANKS
from treadle.api.types import GrammarSpec, Tokenizer, Tool

__all__ = ("Llama3",)

TAG = "<|python_tag|>"
KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})
_candidate = re.compile(r"[{<]")


class Llama3(CallParser):
    tags = (TAG,)

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = tools
        self._names = frozenset(tool.name for tool in tools)
        self._fresh = True  # nothing but blanks since the line began

    def say(self, text: str) -> None:
        _, broken, last = text.rpartition("\n")
        self._fresh = (self._fresh or broken != "") and not last.strip()
        super().say(text)

    def text(self, text: str, at: int) -> int:
        found = _candidate.search(text, at)
        start = found.start() if found else len(text)
        self.say(text[at:start])
        if found is None:
            return start
        if text[start] == "{":
            if self._fresh:
                self.call(self._bare())
                return start
        elif (behind := self.expect(text, start, TAG)) is not None:
            if not self.carry:
                self.lead.append(TAG)
                self.mode = self._tagged
            return behind
        self.say(text[start])
        return start + 1

    def _tagged(self, text: str, at: int) -> int:
        if text[at] == "{":
            self.call(CallReader(self.calls))
            return at
        if text[at] not in BLANKS:
            return self.give_up(at)
        self.lead.append(text[at])
        return at + 1

    def after(self, text: str, at: int) -> int:
        if text[at] == "{":
            self.call(self._bare())
            return at
        if text[at] not in BLANKS and text[at] != ";":
            return self.give_up(at)
        self.lead.append(text[at])
        return at + 1

    def _bare(self) -> CallReader:
        return CallReader(self.calls, self._names.__contains__, KEYS)

    def grammar(self, choice: str | Mapping[str, Any]) -> GrammarSpec:
        """One call. JSON without anything around it: every backend can enforce it."""
        calls: list[dict[str, Any]] = []
        shared: dict[str, Any] = {}
        for index, tool in enumerate(chosen(self._tools, choice)):
            schema = _moved(schema_of(tool), f"tool{index}-", shared)
            parts = {"name": {"type": "string", "enum": [tool.name]}, "parameters": schema}
            calls.append(
                {
                    "type": "object",
                    "properties": parts,
                    "required": list(parts),
                    "additionalProperties": False,
                }
            )
        whole: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if shared:
            whole = {**whole, "$defs": shared}
        return GrammarSpec("json_schema", json.dumps(whole))


def _moved(schema: dict[str, Any], prefix: str, shared: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as a part of another: its definitions move to ``shared``, under other names."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy(item) for item in value]
        if not isinstance(value, dict):
            return value
        found = {key: copy(item) for key, item in value.items()}
        target = found.get("$ref")
        if isinstance(target, str):
            for home in ("#/$defs/", "#/definitions/"):
                if target.startswith(home):
                    found["$ref"] = f"#/$defs/{prefix}{target.removeprefix(home)}"
        return found

    moved: dict[str, Any] = copy(schema)
    for home in ("$defs", "definitions"):
        definitions = moved.pop(home, None)
        if isinstance(definitions, dict):
            shared |= {f"{prefix}{name}": value for name, value in definitions.items()}
    return moved
