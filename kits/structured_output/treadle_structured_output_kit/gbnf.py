"""Grammars in GBNF, the form of llama.cpp that xgrammar and others have extended, read into nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

__all__ = (
    "Characters",
    "Choice",
    "Macro",
    "Node",
    "Reference",
    "Repeat",
    "Row",
    "Text",
    "is_gbnf",
    "nodes_in",
    "parse_gbnf",
)

MAX_DEPTH = 64
MAX_REPEATS = 8
NAME = re.compile(r"[A-Za-z_.\-][\w.\-]*")
RULE = re.compile(r"([A-Za-z_.\-][\w.\-]*)(\[[^\]\n]*\])?\s*::=")
FIRST_RULE = re.compile(rf"^\s*{RULE.pattern}", re.MULTILINE)
SPACE = re.compile(r"(?:\s|#[^\n]*)*")
COUNTS = re.compile(r"\s*\{\s*(\d+)\s*(?:(,)\s*(-\s*1|\d*)\s*)?\}")
NUMBER = re.compile(r"-?\d+")
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b"}  # fmt: skip
HEX = {"x": r"[0-9a-fA-F]{1,8}", "u": r"[0-9a-fA-F]{4}", "U": r"[0-9a-fA-F]{8}"}
MACROS = ("ExcludeToken", "Regex", "Substring", "TagDispatch", "Token", "TokenTagDispatch")
LAST = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Text:
    value: str


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of some ranges of code points, or of none of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """Parts one behind the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``most`` is ``None`` for any number."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Macro:
    """What xgrammar writes like a call, ``Regex("[a-z]+")``."""

    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()


Node = Text | Characters | Reference | Row | Choice | Repeat | Macro


def is_gbnf(source: str) -> bool:
    """Whether a grammar is in GBNF, and not in Lark: whether a line begins a rule with ``::=``."""
    return FIRST_RULE.search(source) is not None


def parse_gbnf(source: str) -> dict[str, Node]:
    """Return the rules of a grammar by name. Raises ``ValueError`` that says where it is wrong."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise ValueError("the grammar has no rule root")
    for name, body in rules.items():
        for node in nodes_in(body):
            if isinstance(node, Reference) and node.name not in rules:
                raise ValueError(f"the rule {name} refers to {node.name}, which is no rule")
    return rules


def nodes_in(node: Node) -> Iterator[Node]:
    """Yield a node and all of which it consists."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        match current:
            case Row(parts) | Choice(parts):
                pending += parts
            case Repeat(part=part):
                pending.append(part)


@dataclass(slots=True)
class _Parser:
    text: str
    pos: int = 0
    depth: int = 0
    found: dict[str, Node] = field(default_factory=dict)

    def rules(self) -> dict[str, Node]:
        self._skip()
        while self.pos < len(self.text):
            start = RULE.match(self.text, self.pos)
            if start is None:
                self._fail("a rule, name ::= …, is expected")
            name = start[1]
            if start[2] is not None:
                self._fail(f"attributes of rules, {start[2]}, are not supported")
            if name in self.found:
                self._fail(f"the rule {name} is there already")
            self.pos = start.end()
            self.found[name] = self._choice()
            self._skip()
        return self.found

    def _choice(self) -> Node:
        options = [self._row()]
        while self._take("|"):
            options.append(self._row())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _row(self) -> Node:
        parts = []
        self._skip()
        while (
            self.pos < len(self.text)
            and self.text[self.pos] not in "|)"
            and not RULE.match(self.text, self.pos)
        ):
            part = self._part()
            if part is not None:
                parts.append(self._counted(part))
            self._skip()
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _part(self) -> Node | None:
        char = self.text[self.pos]
        if char == '"':
            return Text(self._quoted())
        if char == "[":
            return self._characters()
        if char == ".":
            self.pos += 1
            return Characters((), is_negated=True)
        if char == "(":
            return self._group()
        name = NAME.match(self.text, self.pos)
        if name is None:
            self._fail("a text, a rule or a group is expected")
        self.pos = name.end()
        if name[0] in MACROS and self._take("("):
            arguments, options = self._arguments()
            return Macro(name[0], arguments, options)
        return Reference(name[0])

    def _group(self) -> Node | None:
        """Return what stands in brackets, ``None`` for ``(= …)``: what follows says the same."""
        self._deeper()
        self.pos += 1
        is_ahead = self._take("=")
        part = self._choice()
        if not self._take(")"):
            self._fail("a ) is expected")
        self.depth -= 1
        return None if is_ahead else part

    def _counted(self, part: Node) -> Node:
        for _ in range(MAX_REPEATS):
            char = self.text[self.pos : self.pos + 1]
            if char and char in "*+?":
                self.pos += 1
                part = Repeat(part, int(char == "+"), 1 if char == "?" else None)
                continue
            counts = COUNTS.match(self.text, self.pos)
            if counts is None:
                break
            least = int(counts[1])
            most = least if counts[2] is None else int(counts[3]) if counts[3].isdigit() else None
            if most is not None and most < least:
                self._fail(f"{counts[0]} allows no number of repeats")
            part, self.pos = Repeat(part, least, most), counts.end()
        else:
            self._fail("there are too many repeats of repeats")
        return part

    def _quoted(self) -> str:
        self.pos += 1
        found = ""
        while not self._take('"', skip=False):
            if self.pos >= len(self.text) or self.text[self.pos] == "\n":
                self._fail("the text has no end")
            found += chr(self._character())
        return found

    def _characters(self) -> Characters:
        self.pos += 1
        is_negated = self._take("^", skip=False)
        ranges = []
        while not self._take("]", skip=False):
            if self.pos >= len(self.text) or self.text[self.pos] == "\n":
                self._fail("the characters in [ ] have no end")
            first = last = self._character()
            if self.text.startswith("-", self.pos) and not self.text.startswith("-]", self.pos):
                self.pos += 1
                last = self._character()
            if last < first:
                self._fail(f"the range of characters {chr(first)!r} to {chr(last)!r} is empty")
            ranges.append((first, last))
        if not ranges and not is_negated:
            self._fail("[] matches no character")
        return Characters(tuple(ranges), is_negated)

    def _character(self) -> int:
        """Return the code point of the next character, which may be escaped."""
        char = self.text[self.pos : self.pos + 1]
        self.pos += 1
        if char != "\\":
            return ord(char)
        char = self.text[self.pos : self.pos + 1]
        self.pos += 1
        if char in HEX:
            digits = re.compile(HEX[char]).match(self.text, self.pos)
            if digits is None or int(digits[0], 16) > LAST:
                self._fail(f"\\{char} needs the digits of a character")
            self.pos = digits.end()
            return int(digits[0], 16)
        if char and char in CONTROLS:
            return ord(CONTROLS[char])
        if not char or char.isalnum():
            self._fail(f"\\{char} is no escape of a character")
        return ord(char)

    def _arguments(self) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Return the arguments of a call up to its bracket: texts, numbers, names and tuples of them."""
        values: list[Any] = []
        options: list[tuple[str, Any]] = []
        while not self._take(")"):
            name = NAME.match(self.text, self.pos)
            if name is not None and self.text[name.end() :].lstrip().startswith("="):
                self.pos = name.end()
                self._take("=")
                options.append((name[0], self._argument()))
            else:
                values.append(self._argument())
            if not self._take(",") and not self.text.startswith(")", self.pos):
                self._fail("a , or ) is expected")
        return tuple(values), tuple(options)

    def _argument(self) -> Any:
        self._skip()
        if self.text.startswith('"', self.pos):
            return self._quoted()
        if self._take("("):
            self._deeper()
            values = self._arguments()[0]
            self.depth -= 1
            return values
        found = NUMBER.match(self.text, self.pos) or NAME.match(self.text, self.pos)
        if found is None:
            self._fail("a text, a number or a name is expected")
        self.pos = found.end()
        words = {"true": True, "false": False}
        return (
            int(found[0])
            if found[0].lstrip("-").isdigit()
            else words.get(found[0], Reference(found[0]))
        )

    def _take(self, char: str, *, skip: bool = True) -> bool:
        """Read ``char`` if it comes next, and blanks around it if ``skip``."""
        if skip:
            self._skip()
        if not self.text.startswith(char, self.pos):
            return False
        self.pos += len(char)
        if skip:
            self._skip()
        return True

    def _skip(self) -> None:
        found = SPACE.match(self.text, self.pos)
        self.pos = found.end() if found else self.pos

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")

    def _fail(self, reason: str) -> NoReturn:
        line = self.text.count("\n", 0, self.pos) + 1
        near = self.text[max(0, self.pos - 20) : self.pos + 20]
        raise ValueError(f"{reason} in line {line} of the grammar, near {near!r}")
