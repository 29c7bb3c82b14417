"""Parsers of formats that write each argument as an element of its own: ``ElementFormat``.

::

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

A text is a text without quotes, and any other value is JSON: which one it is, the schema of the tool
says. A call is handed on when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle.errors import RequestError
from treadle_parsing_kit.argument_values import ArgumentSchemas, Unenforceable
from treadle_parsing_kit.block_family import BlockFamilyParser
from treadle_parsing_kit.json_calls import is_name
from treadle_parsing_kit.tool_choice import ANYWHERE, arguments_schema, pattern_of
from treadle_parsing_kit.written_values import read_value

__all__ = ("ElementFamilyParser", "ElementFormat")

ANY_KEY = r'/[^<>"\s]+/'
"""A Lark expression of the name of an argument."""
MAX_CHARS = 1 << 20
"""Of the rules of one function, in which what several arguments refer to stands several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat:
    """One format. ``begin`` and ``end`` enclose a call, ``open`` and ``close`` a parameter.

    ``name`` matches what follows ``begin`` up to the first parameter, and ``parameter`` a parameter;
    its groups are the key and the value. ``newlines``: a value stands on lines of its own. ``block``
    stands before, between and behind the calls of a block, the others are the layout of a call.
    """

    begin: str
    end: str
    open: str
    close: str
    name: re.Pattern[str]
    parameter: re.Pattern[str]
    special_tags: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    newlines: bool = False
    block: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    head: tuple[str, ...]
    argument: tuple[str, ...]
    tail: tuple[str, ...]


class ElementFamilyParser(BlockFamilyParser):
    """A parser of one ``ElementFormat``."""

    format: ElementFormat

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        form = self.format
        self.special_tags, self.head = form.special_tags, form.head
        super().__init__(
            tokenizer, tools, wrappers=form.wrappers, begin=form.begin, closers=form.closers
        )
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._schemas: dict[str, ArgumentSchemas | None] = {}
        self._body: list[str] = []
        self._in_value = False

    def begin_call(self) -> None:
        self._body.clear()
        self._in_value = False

    def read_call(self, text: str, pos: int) -> int:
        form = self.format
        outside = (form.open, form.end, *self._wrappers, self._begin)
        before, tag, end = self.scan(text, pos, *((form.close,) if self._in_value else outside))
        self._body.append(before)
        self.call_prefix.append(before)
        if tag in (form.open, form.close):
            self._in_value = tag == form.open
        elif tag == form.end:
            call = self._call("".join(self._body))
            if call is None:
                self.call_prefix.append(tag)
                return self.abandon_call(end)
            self.emit_call(*call)
            return end
        elif tag:
            return self.restart(tag, end)
        self._body.append(tag)
        self.call_prefix.append(tag)
        return end

    def name_in(self, header: str) -> str:
        match = self.format.name.match(header)
        return match[1] if match is not None and match.end() == len(header) else ""

    def _call(self, body: str) -> tuple[str, str] | None:
        """Return the name and the arguments, ``None`` if it is no call."""
        match = self.format.name.match(body)
        if match is None or not is_name(match[1]):
            return None
        schema, name = self._schema(match[1]), match[1]
        arguments: dict[str, Any] = {}
        while match.end() < len(body):
            pos = match.end()
            match = self.format.parameter.match(body, pos)
            if match is None or match[1] in arguments:
                return None
            value = match[2]
            if self.format.newlines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[match[1]] = read_value(value, schema.options(match[1]) if schema else [])
        return name, json.dumps(arguments, ensure_ascii=False)

    def _schema(self, name: str) -> ArgumentSchemas | None:
        """Return the schemas of a function's arguments, ``None`` if nothing is known of them."""
        if name not in self._schemas:
            try:
                self._schemas[name] = ArgumentSchemas(self._parameters.get(name) or {})
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
                self._schemas[name] = None
        return self._schemas[name]

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        form = self.format
        self.call_opener = form.head[0]
        is_auto = choice == "auto"

        def call(i: int, tool: Tool) -> Iterator[str]:
            if is_auto and not tool.strict:  # its arguments are any
                head, tail = (self._rule(p, tool.name) for p in (form.head, form.tail))
                yield f"call_{i}: {head} any_argument* {tail}"
                return
            arguments_schema(tool)  # refuses what is none
            try:
                yield from self._call_rules(i, tool)
            except Unenforceable as error:
                raise RequestError(
                    f"{error} of the strict function {tool.name[:64]!r} cannot be enforced in the format of "
                    "this model's calls, which writes texts as they are; leave it out, or send strict false",
                    param="tools",
                ) from None
            except RequestError:
                raise
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise RequestError(
                    f"the parameters of the function {tool.name[:64]!r} are no JSON schema: a keyword has a "
                    "value of another type than it may have",
                    param="tools",
                ) from error

        grammar = self.layout_grammar(choice, form.block, call)
        if grammar is None:
            return None
        lines = [grammar.source, f"any_argument: {self._argument(None, 'VALUE_TEXT')}"]
        return GrammarSpec("ebnf", "\n".join([*lines, f"VALUE_TEXT: {self._value_text()}"]))

    def _call_rules(self, i: int, tool: Tool) -> Iterator[str]:
        form, closes, num_chars = self.format, self._closes_with_token(), 0
        schemas = ArgumentSchemas(tool.parameters, strict=tool.strict)
        parts = [self._rule(form.head, tool.name)]
        for j, key in enumerate(schemas.properties):
            parts.append(f"argument_{i}_{j}{'' if key in schemas.required else '?'}")
        yield f"call_{i}: {' '.join((*parts, self._rule(form.tail, tool.name)))}"
        for j, key in enumerate(schemas.properties):
            if tool.strict and not self._can_write(key):
                raise Unenforceable(f"the name {key[:64]!r} of an argument")
            try:
                text, other = schemas.expressions(key, form.close)
            except Unenforceable as error:
                raise Unenforceable(f"{error} of the argument {key[:64]!r}") from None
            num_chars += len(text) + len(other)
            if num_chars > MAX_CHARS:
                raise RequestError(
                    f"the parameters of the function {tool.name[:64]!r} make a grammar of more than "
                    f"{MAX_CHARS} characters; make them smaller",
                    param="tools",
                )
            text_rule, other_rule = f"text_{i}_{j}" * bool(text), f"value_{i}_{j}" * bool(other)
            if other:
                yield f"{other_rule}: {other}"
            if text == f"/{ANYWHERE}/":
                text_rule = "VALUE_TEXT"
            elif text and closes:
                text_rule = f"TEXT_{i}_{j}"
                yield f"{text_rule}: {text}"
            elif text:  # lazy: that nothing more may follow would be much to find out
                yield f"{text_rule}[lazy]: CLOSED_{i}_{j}"
                yield f"CLOSED_{i}_{j}: {text} /{pattern_of(self._closing)}/"
            yield f"argument_{i}_{j}: {self._argument(key, text_rule, other_rule)}"

    def _can_write(self, key: str) -> bool:
        """Whether the name of an argument is read as it is written."""
        written = "".join(self.format.argument).replace("{name}", key).replace("{value}", "")
        match = self.format.parameter.fullmatch(written)
        return match is not None and match[1] == key

    def _rule(self, pieces: Sequence[str], name: str | None) -> str:
        """Return a Lark expression of a layout; a name that is ``None`` may be any."""
        if name is not None:
            return self.rule([piece.replace("{name}", name) for piece in pieces])
        parts = [part for piece in pieces for part in re.split(r"(\{name\})", piece) if part]
        return " ".join(ANY_KEY if part == "{name}" else self.rule([part]) for part in parts)

    def _argument(self, key: str | None, text: str, other: str = "") -> str:
        """Return a Lark expression of an argument. ``text`` has the tag that closes it in it, if that is
        no token, and ``other`` has not."""
        pieces = self.format.argument
        i = pieces.index("{value}")
        behind = pieces[i + 1 :]
        options = [f"{other} {self._rule(behind, key)}"] if other else []
        if text and not self._closes_with_token():
            behind = (behind[0].removeprefix(self._closing), *behind[1:])
        if text:
            options.append(f"{text} {self._rule([piece for piece in behind if piece], key)}")
        return f"{self._rule(pieces[:i], key)} ({' | '.join(options)})"

    @property
    def _closing(self) -> str:
        """What stands behind a value up to the end of the tag that closes it."""
        behind = self.format.argument[self.format.argument.index("{value}") + 1]
        return behind.partition(self.format.close)[0] + self.format.close

    def _value_text(self) -> str:
        """Any text, with what closes it: where a lexer is greedy, it would never end by itself. A
        line break before that is a part of the text."""
        if self._closes_with_token():
            return f"/{ANYWHERE}/"
        text = f"(/{ANYWHERE}/ & ~/{ANYWHERE}{pattern_of(self.format.close)}{ANYWHERE}/)"
        return f"{text} /{pattern_of(self.format.close)}/"

    def _closes_with_token(self) -> bool:
        return self.rule([self.format.close]).startswith("<[")
