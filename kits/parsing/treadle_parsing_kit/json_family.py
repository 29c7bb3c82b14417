"""Parsers of formats whose calls are JSON objects, told apart by a table: ``JsonFormat``.

::

    <tool_call>{"name": "f", "arguments": {…}}</tool_call>
    <|tool_call|>[{"name": "f", "arguments": {…}}, …]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle_parsing_kit.incremental_json import BLANKS
from treadle_parsing_kit.json_calls import JsonToolCallReader
from treadle_parsing_kit.tool_call_parser import ToolCallParser
from treadle_parsing_kit.tool_choice import (
    ANYWHERE,
    BLANK,
    LINE_START,
    arguments_rule,
    free_text_rules,
    lark_string,
    names_one_tool,
    object_pattern,
    pattern_of,
    selected_tools,
    tag_rule,
    untagged_text_rules,
)

__all__ = ("JsonFamilyParser", "JsonFormat")

_braces = re.compile(r"\{*")
KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFormat:
    """One format. The first of ``begin`` and of ``end`` are what the model is taught to write.

    ``words`` and ``end_words`` are no tags but text, which encloses a block too if that names tools of
    the request. ``arrays``: the objects of a block stand in a list. ``bare``: a list without any tag is a block if a line
    begins with it and it names tools of the request. ``head``, ``separator`` and ``tail`` are the
    layout of forced calls.
    """

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    end_words: tuple[str, ...] = ()
    arrays: bool = False
    bare: bool = False
    arguments: str = "arguments"
    head: str = ""
    separator: str = ", "
    tail: str = ""


class JsonFamilyParser(ToolCallParser):
    """A parser of one ``JsonFormat``. Written loosely it is read all the same: several objects in a
    block without a list, and a block that the end of the output or the next one closes.

    Behind an object that is no call, others of the block are found again, by the keys of a call and
    the names of ``tools``.
    """

    format: JsonFormat

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        form = self.format
        self.special_tags = self.special_tags or (*form.begin, *form.end)
        super().__init__()
        self._tokenizer, self._tools = tokenizer, tools
        self._names = frozenset(tool.name for tool in tools)
        self._openers = (*form.begin, *form.words, *(("[",) if form.bare else ()))
        self._closers = (*form.end, *form.end_words)
        self._array = self._comma = self._bare = self._is_broken = False
        self._at_line_start = True
        if not form.bare:
            self.expect_openers("".join(text[0] for text in (*self._openers, *self._closers, "{")))

    def emit_text(self, text: str) -> None:
        if self.format.bare:
            _, newline, last = text.rpartition("\n")
            self._at_line_start = (self._at_line_start or newline != "") and not last.strip()
        super().emit_text(text)

    def read_text(self, text: str, pos: int) -> int:
        if not self._is_broken:
            tag, end = self.find_tag(text, pos, *self._openers)
            return self._open(tag, end) if tag else end
        tag, end = self.find_tag(text, pos, "{", *self._openers, *self._closers)
        if tag == "{":
            run = _braces.match(text, end)
            last = end - 1 if run is None else run.end() - 1  # only it may begin an object
            self.emit_text(text[end - 1 : last])
            self._start(self._strict())
            return last
        self._is_broken = tag in ("", "[")
        if tag in self._openers:
            return self._open(tag, end)
        self.emit_text(tag)
        return end

    def _open(self, tag: str, end: int) -> int:
        self._array, self._bare = False, tag not in self.format.begin
        if tag == "[":
            if not self._at_line_start:
                self.emit_text(tag)
                return end
            self._array = self._comma = True
        self.call_prefix.append(tag)
        self.mode = self._read_item if self._array else self.read_first
        return end

    def read_first(self, text: str, pos: int) -> int:
        """Read behind an opening tag."""
        if text[pos] == "[" and self.format.arrays:
            self._array = self._comma = True
            self.mode = self._read_item
            self.call_prefix.append(text[pos])
            return pos + 1
        return self._read_item(text, pos)

    def _read_item(self, text: str, pos: int) -> int:
        if text[pos] == "{":
            self._start(self._strict() if self._bare else JsonToolCallReader(self.calls))
            return pos
        if text[pos] not in BLANKS:
            return self.abandon_call(pos)
        self.call_prefix.append(text[pos])
        return pos + 1

    def _start(self, reader: JsonToolCallReader) -> None:
        self._comma = False
        self.start_call(reader)

    def _strict(self) -> JsonToolCallReader:
        return JsonToolCallReader(self.calls, self._names.__contains__, KEYS)

    def recover(self, pos: int) -> int:
        self._is_broken = not self._bare or self.calls > 0
        return self.abandon_call(pos)

    def read_after_call(self, text: str, pos: int) -> int:
        self._is_broken = False
        char = text[pos]
        if char in BLANKS or (char == "," and self._array and not self._comma):
            self._comma = self._comma or char == ","
            self.call_prefix.append(char)
            return pos + 1
        if char == "]" and self._array:
            self.call_prefix.clear()
            self._array = False
            return pos + 1
        if char == "{" and (self._comma or not self._array):
            return self._read_item(text, pos)
        for tag in self._closers:
            end = self.expect_tag(text, pos, tag)
            if end is not None:
                return end if self.pending else self.end_call(end)
        return self.recover(pos) if self._array else self.abandon_call(pos)

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        form = self.format
        tools = selected_tools(self._tools, choice)
        begin = self._rule(form.begin[0]) if form.begin else []
        end = self._rule(form.end[0]) if form.end else []
        head, tail = (
            [lark_string(form.head)] * bool(form.head),
            [lark_string(form.tail)] * bool(form.tail),
        )
        is_single = names_one_tool(choice)
        if choice == "auto" and (form.words or not form.begin):
            return self._text_with_lists(tools, " ".join(end))
        if choice == "auto":
            repeated = f"call ({lark_string(form.separator)} call)*" if form.arrays else "call"
            lines = free_text_rules(self._tags_of(form.begin[0])[0], "block", self._tokenizer)
            lines.append(" ".join(["block:", *begin[1:], *head, repeated, *tail, *end]))
        elif form.arrays:
            repeated = "call" if is_single else f"call ({lark_string(form.separator)} call)*"
            lines = ["start: block", " ".join(["block:", *begin, *head, repeated, *tail, *end])]
        else:
            repeated = f"block ({lark_string(form.separator)} block)*"
            lines = [f"start: {'block' if is_single else repeated}"]
            lines.append(" ".join(["block:", *begin, *head, "call", *tail, *end]))
        lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
        for i, tool in enumerate(tools):
            name = f'{{"name": {lark_string(tool.name)}, "{form.arguments}": '
            lines += [
                f'call_{i}: {lark_string(name)} arguments_{i} "}}"',
                f"arguments_{i}: {arguments_rule(tool, choice)}",
            ]
        return GrammarSpec("ebnf", "\n".join(lines))

    def _text_with_lists(self, tools: Sequence[Tool], closing: str) -> GrammarSpec:
        """Text in which a list where one of calls may begin, with the name of a tool or arguments, is one.

        ``closing`` ends one that a tag begins.
        """
        items = [
            (
                f'{{"name": {lark_string(tool.name)}, "{self.format.arguments}": ',
                f'{arguments_rule(tool, "auto")} "}}"',
            )
            for tool in tools
        ]
        more = " | ".join(f"{lark_string(head)} rest_of_{i}" for i, (head, _) in enumerate(items))
        calls = [(f"[{head}", f'rest_of_{i} (", " call)* "]"') for i, (head, _) in enumerate(items)]
        words = "|".join(map(pattern_of, self.format.words))
        opening, before = rf"\[?{BLANK}*", rf"{ANYWHERE}(?:{words}){BLANK}*"
        if self.format.bare:
            opening = rf"(\[|({words}){BLANK}*\[?){BLANK}*"
            before = rf"({LINE_START}|{ANYWHERE}(?:{words}))"
        rules = untagged_text_rules(
            opening + object_pattern(tools),
            calls,
            before=before,
            between=r"[, \t\r\n]*",
            tags=self.format.begin[:1],
            closing=closing,
            tokenizer=self._tokenizer,
        )
        rules += [f"call: {more}", *(f"rest_of_{i}: {rest}" for i, (_, rest) in enumerate(items))]
        return GrammarSpec("ebnf", "\n".join(rules))

    def _rule(self, text: str) -> list[str]:
        return [tag_rule(part, self._tokenizer) for part in self._tags_of(text)]

    def _tags_of(self, text: str) -> list[str]:
        """Return the parts of a text in which there may be several tags."""
        tags = "|".join(map(re.escape, self.special_tags))
        return [part for part in re.split(f"({tags})", text) if part]
