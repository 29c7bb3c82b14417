"""Parsers of formats that write the name of a function and then its arguments as JSON: ``NamedFormat``.

::

    <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.block_family import BlockFamilyParser
from treadle_parsing_kit.json_calls import ArgumentsReader, is_name
from treadle_parsing_kit.tool_choice import arguments_rule

__all__ = ("NamedFamilyParser", "NamedFormat")

MAX_HEADER_LEN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFormat:
    """One format. ``header`` matches all between ``begin`` and the first brace of the arguments, with
    the group ``name``. ``block`` stands before, between and behind the calls of a block, ``head`` and
    ``tail`` around arguments, with ``{name}`` and ``{index}`` in them; each tag is a piece of its
    own."""

    begin: str
    header: re.Pattern[str]
    special_tags: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    closers: tuple[str, ...]
    block: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    head: tuple[str, ...]
    tail: tuple[str, ...] = ()


class NamedFamilyParser(BlockFamilyParser):
    """A parser of one ``NamedFormat``."""

    format: NamedFormat

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        form = self.format
        self.special_tags, self.head = form.special_tags, form.head
        super().__init__(
            tokenizer, tools, wrappers=form.wrappers, begin=form.begin, closers=form.closers
        )
        self._header: list[str] = []

    def begin_call(self) -> None:
        self._header.clear()

    def read_call(self, text: str, pos: int) -> int:
        before, tag, end = self.scan(text, pos, "{", *self._wrappers, self._begin)
        self._header.append(before)
        self.call_prefix.append(before)
        if tag == "{":
            match = self.format.header.fullmatch("".join(self._header))
            if match is None or not is_name(match["name"]):
                return self.abandon_call(end - 1)
            self.take_header(match)
            self.start_call(ArgumentsReader(self.calls, match["name"]))
            return end - 1
        if tag:
            return self.restart(tag, end)
        too_long = sum(map(len, self._header)) > MAX_HEADER_LEN
        return self.abandon_call(end) if too_long else end

    def name_in(self, header: str) -> str:
        match = self.format.header.fullmatch(header)
        return "" if match is None else match["name"]

    def take_header(self, match: re.Match[str]) -> None:
        """The name of a call is known."""

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        form = self.format

        def call(i: int, tool: Tool) -> list[str]:
            head = " ".join(
                "/[0-9]/" if piece == "{index}" else self.rule([piece.replace("{name}", tool.name)])
                for piece in form.head
            )
            return [
                f"call_{i}: {head} arguments_{i} {self.rule(form.tail)}",
                f"arguments_{i}: {arguments_rule(tool, choice)}",
            ]

        return self.layout_grammar(choice, form.block, call)
