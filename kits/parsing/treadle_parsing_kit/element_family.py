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

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle.errors import RequestError
from treadle_parsing_kit.block_family import BlockFamilyParser
from treadle_parsing_kit.json_calls import is_name
from treadle_parsing_kit.tool_choice import ANYWHERE, arguments_schema, lark_string, pattern_of

__all__ = ("ElementFamilyParser", "ElementFormat", "argument_value")

ANY_KEY = r'/[^<>"\s]+/'
"""A Lark expression of the name of an argument."""
TEXT_RULES = frozenset({"format", "maxLength", "minLength", "pattern"})


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
        self._schemas = {tool.name: tool.parameters for tool in tools}
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
        schema, name = self._schemas.get(match[1], {}), match[1]
        arguments: dict[str, Any] = {}
        while match.end() < len(body):
            pos = match.end()
            match = self.format.parameter.match(body, pos)
            if match is None or match[1] in arguments:
                return None
            value = match[2]
            if self.format.newlines:
                value = value.removeprefix("\n").removesuffix("\n")
            properties = schema.get("properties")
            known = properties.get(match[1]) if isinstance(properties, Mapping) else None
            arguments[match[1]] = argument_value(value, known)
        return name, json.dumps(arguments, ensure_ascii=False)

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        form = self.format
        self.call_opener = form.head[0]
        is_auto = choice == "auto"

        def call(i: int, tool: Tool) -> Iterator[str]:
            if is_auto and not tool.strict:  # its arguments are any
                head, tail = (self._rule(p, tool.name) for p in (form.head, form.tail))
                yield f"call_{i}: {head} any_argument* {tail}"
                return
            schema = arguments_schema(tool)
            properties = schema.get("properties") or {}
            required = set(schema.get("required") or ())
            shared: dict[str, Any] = {
                key: schema[key] for key in ("$defs", "definitions") if key in schema
            }
            parts = [self._rule(form.head, tool.name)]
            for j, key in enumerate(properties):
                parts.append(f"argument_{i}_{j}{'' if key in required else '?'}")
            yield f"call_{i}: {' '.join((*parts, self._rule(form.tail, tool.name)))}"
            for j, (key, value) in enumerate(properties.items()):
                if _takes_any_text(value):
                    if tool.strict and (rules := TEXT_RULES & value.keys()):
                        raise RequestError(
                            f"{sorted(rules)[0]} of the argument {key[:64]!r} of the strict function "
                            f"{tool.name[:64]!r} cannot be enforced in the format of this model's calls, which "
                            "writes texts as they are; leave it out, or send strict false",
                            param="tools",
                        )
                    yield f"argument_{i}_{j}: {self._argument(key, 'VALUE_TEXT')}"
                    continue
                yield f"argument_{i}_{j}: {self._argument(key, f'value_{i}_{j}')}"
                yield f"value_{i}_{j}: {_value_rule(value, shared, strict=tool.strict)}"

        grammar = self.layout_grammar(choice, form.block, call)
        if grammar is None:
            return None
        lines = [grammar.source, f"any_argument: {self._argument(None, 'VALUE_TEXT')}"]
        return GrammarSpec("ebnf", "\n".join([*lines, f"VALUE_TEXT: {self._value_text()}"]))

    def _rule(self, pieces: Sequence[str], name: str | None) -> str:
        """Return a Lark expression of a layout; a name that is ``None`` may be any."""
        if name is not None:
            return self.rule([piece.replace("{name}", name) for piece in pieces])
        parts = [part for piece in pieces for part in re.split(r"(\{name\})", piece) if part]
        return " ".join(ANY_KEY if part == "{name}" else self.rule([part]) for part in parts)

    def _argument(self, key: str | None, value: str) -> str:
        pieces = self.format.argument
        i = pieces.index("{value}")
        behind = pieces[i + 1 :]
        if value == "VALUE_TEXT" and not self._closes_with_token():
            behind = behind[1:]
        return " ".join((self._rule(pieces[:i], key), value, self._rule(behind, key)))

    def _value_text(self) -> str:
        """Any text, with what closes it: where a lexer is greedy, it would never end by itself. A
        line break before that is a part of the text."""
        if self._closes_with_token():
            return f"/{ANYWHERE}/"
        form = self.format
        closing = form.argument[form.argument.index("{value}") + 1].lstrip("\n")
        text = f"(/{ANYWHERE}/ & ~/{ANYWHERE}{pattern_of(form.close)}{ANYWHERE}/)"
        return f"{text} /{pattern_of(closing)}/"

    def _closes_with_token(self) -> bool:
        return self.rule([self.format.close]).startswith("<[")


def argument_value(text: str, schema: Any) -> Any:
    """Return the value that ``text`` means: itself where the schema takes texts only, else JSON or,
    as models write it too, a literal of Python."""
    if isinstance(schema, Mapping):
        if schema.get("type") == "string":
            return text
        options = schema.get("enum")
        if isinstance(options, list) and text in options:
            return text
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        word = text.strip()
        if word in ("True", "False", "None"):
            return ast.literal_eval(word)
        return text
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _takes_any_text(schema: Any) -> bool:
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    return is_text and not {"const", "enum"} & schema.keys()


def _value_rule(schema: Any, shared: Mapping[str, Any], *, strict: bool) -> str:
    """Return a Lark expression for a value."""
    if isinstance(schema, Mapping):
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and options:
            texts = [o if isinstance(o, str) else json.dumps(o) for o in options]
            return " | ".join(map(lark_string, texts))
        layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return f"%json {json.dumps({**schema, **shared, 'x-guidance': {**layout, 'lenient': not strict}})}"
    return "%json {}"
