"""What the items of an open array have to be, so that it can still be closed: for ``uniqueItems`` and ``contains``."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from treadle_structured_output_kit.listed_values import begins
from treadle_structured_output_kit.plain_values import canonical, matches

__all__ = ("ArrayItems", "NextItem", "Wanted", "can_become", "first_type")

TYPE_OF_FIRST = {
    '"': "string",
    "{": "object",
    "[": "array",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
MAX_EXPONENT = 24
MAX_BEGUN = 4096
"""Bytes of an open item that are looked at; longer ones are checked as they close."""


def first_type(first: str) -> str:
    """Return the type of a value that begins with this character."""
    return TYPE_OF_FIRST.get(first, "number")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A ``contains`` of an array: how many more items must match it, and how many may."""

    schema: Any
    least: float
    most: float

    def after(self, is_match: bool) -> Wanted:
        return replace(self, least=self.least - 1, most=self.most - 1) if is_match else self


@dataclass(frozen=True, slots=True)
class NextItem:
    """What the next item may be.

    ``listed`` are its values, if they are known. It must match ``must`` and must not match ``must_not``;
    ``schemas`` are those of all items.
    """

    listed: tuple[Any, ...] | None = None
    must: tuple[Any, ...] = ()
    must_not: tuple[Any, ...] = ()
    schemas: tuple[Any, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether an item that is free is not looked at before it closes."""
        return self.listed is None and not self.must and not self.must_not

    def begun(self, text: bytes) -> NextItem | None:
        """Return what is left of this when the item begins with ``text``, ``None`` if no item does."""
        if self.is_free or len(text) > MAX_BEGUN:
            return self
        if self.listed is not None:
            listed = tuple(value for value in self.listed if begins(text, value))
            return replace(self, listed=listed) if listed else None
        if self.must and not can_become([*self.schemas, *self.must], text):
            return None
        if any(_must_match(schema, self.schemas, text) for schema in self.must_not):
            return None
        return self


@dataclass(frozen=True, slots=True)
class ArrayItems:
    """The items of an array so far, and those that it still needs.

    ``domain(index)`` lists the values that the item at ``index`` may have, ``None`` if they are many. Behind
    the first ``num_first`` items all others have the same schemas. ``is_plentiful`` says that there are more
    values for them than an array will have items.
    """

    domain: Callable[[int], tuple[Any, ...] | None]
    is_unique: bool = False
    wanted: tuple[Wanted, ...] = ()
    min_items: float = 0
    max_items: float = math.inf
    num_first: int = 0
    is_plentiful: bool = False
    seen: frozenset[str] = frozenset()
    count: int = 0

    @property
    def has_checks(self) -> bool:
        return self.is_unique or bool(self.wanted)

    def after(self, item: Any) -> ArrayItems | None:
        """Return the items with one more, ``None`` if the array cannot be closed by then."""
        seen, value = self.seen, canonical(item) if self.is_unique else ""
        if self.is_unique:
            if value in seen:
                return None
            seen |= {value}
        wanted = tuple(part.after(matches(part.schema, item)) for part in self.wanted)
        found = replace(self, seen=seen, wanted=wanted, count=self.count + 1)
        return found if found.can_close() else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing that is wanted is missing."""
        return all(part.least <= 0 for part in self.wanted)

    def can_close(self) -> bool:
        """Whether further items can make it complete, as far as that is seen."""
        room = self.max_items - self.count
        need = max(self.min_items - self.count, 0)
        left = self._left(self.count) if self.count >= self.num_first else None
        if left is not None and self.is_unique:
            room = min(room, len(left))
        if need > room:
            return False
        for part in self.wanted:
            can_match, can_differ = self._kinds(part, left, room)
            matching = min(part.most, can_match)
            if part.most < 0 or part.least > matching or need > matching + can_differ:
                return False
        return True

    def next_item(self) -> NextItem | None:
        """Return what the next item may be, ``None`` if there can be none."""
        if self.count >= self.max_items:
            return None
        values = self._left(self.count)
        if values is not None:
            possible: dict[tuple[bool, ...], bool] = {}
            listed = []
            for value in values:
                kind = tuple(matches(part.schema, value) for part in self.wanted)
                # What may follow depends on what the item matches, and not on which it is.
                if kind not in possible:
                    possible[kind] = self.after(value) is not None
                if possible[kind]:
                    listed.append(value)
            return NextItem(listed=tuple(listed)) if listed else None
        must, must_not = [], []
        for index, part in enumerate(self.wanted):
            can_differ, can_match = (self._is_possible(index, x) for x in (False, True))
            if not can_differ and not can_match:
                return None
            if not can_differ:
                must.append(part.schema)
            if not can_match:
                must_not.append(part.schema)
        return NextItem(must=tuple(must), must_not=tuple(must_not))

    def _is_possible(self, index: int, is_match: bool) -> bool:
        """Whether the next item may match the ``contains`` of this index, or may not."""
        wanted = self.wanted[index].after(is_match)
        return replace(self, wanted=(wanted,), count=self.count + 1).can_close()

    def _left(self, index: int) -> tuple[Any, ...] | None:
        values = self.domain(index)
        if values is None or not self.is_unique:
            return values
        return tuple(value for value in values if canonical(value) not in self.seen)

    def _kinds(
        self, part: Wanted, left: tuple[Any, ...] | None, room: float
    ) -> tuple[float, float]:
        """Return how many of the items that may follow can match ``part``, and how many can differ."""
        if left is not None:
            num_match = sum(matches(part.schema, value) for value in left)
            num_differ = len(left) - num_match
            if self.is_unique:
                return min(room, num_match), num_differ
            return room if num_match else 0, room if num_differ else 0
        first = [self._left(index) for index in range(self.count, self.num_first)]
        rest = max(0, room - len(first))
        tail = self._left(self.num_first) if rest else ()
        counts = []
        for is_match in (True, False):
            has = [_has(values, part.schema, is_match) for values in first]
            counts.append(
                sum(itertools.islice(has, int(min(room, len(has)))))
                + (rest if rest and _has(tail, part.schema, is_match) else 0)
            )
        return counts[0], counts[1]


def _has(values: tuple[Any, ...] | None, schema: Any, is_match: bool) -> bool:
    return values is None or any(matches(schema, value) == is_match for value in values)


# ---------------------------------------------------------------------- items that are open


def _parts(schemas: Any) -> list[Any]:
    """Return ``schemas`` and the parts of their ``allOf``."""
    found: list[Any] = []
    pending = list(schemas)
    while pending:
        schema = pending.pop()
        found.append(schema)
        if isinstance(schema, Mapping):
            pending += schema.get("allOf", [])
    return found


def can_become(schemas: Any, begun: bytes) -> bool:
    """Whether a value that begins with ``begun`` may match all of ``schemas``, as far as it is seen."""
    parts = [part for part in _parts(schemas) if part is not True]
    if any(part is False for part in parts):
        return False
    kind = first_type(chr(begun[0]))
    for part in parts:
        names = part.get("type", kind)
        names = [names] if isinstance(names, str) else names
        if kind not in [{"integer": "number"}.get(name, name) for name in names]:
            return False
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list) and not any(begins(begun, value) for value in values):
            return False
        options = part.get("anyOf")
        if isinstance(options, list) and not any(can_become([x], begun) for x in options):
            return False
    if kind == "number":
        return _number_fits(parts, begun)
    return kind != "object" or _members_fit(parts, begun)


def _must_match(schema: Any, schemas: tuple[Any, ...], begun: bytes) -> bool:
    """Whether every value that begins with ``begun`` and obeys ``schemas`` matches ``schema``, as far as it is seen."""
    if not isinstance(schema, Mapping):
        return True
    kind = first_type(chr(begun[0]))
    names = schema.get("type", kind)
    names = [names] if isinstance(names, str) else names
    if kind not in [{"integer": "number"}.get(name, name) for name in names]:
        return False
    rules = schema.keys() - {"type"}
    if kind != "number":
        return not rules & {"const", "enum", "anyOf", "allOf"} and (
            kind != "object" or not rules & {"properties", "required"}
        )
    if rules - {"minimum", "maximum"}:
        return False
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    if names == ["integer"] and not _is_integer(schemas):
        return False
    below = [*schemas, {"maximum": least - 1}] if least > -math.inf else None
    above = [*schemas, {"minimum": most + 1}] if most < math.inf else None
    if not _is_integer(schemas):
        return False
    return not any(x is not None and _number_fits(_parts(x), begun) for x in (below, above))


def _is_integer(parts: Any) -> bool:
    return any(isinstance(p, Mapping) and p.get("type") == "integer" for p in _parts(parts))


def _number_fits(parts: list[Any], begun: bytes) -> bool:
    """Whether a number that begins with ``begun`` may lie between the bounds of ``parts``."""
    bounds = [part for part in parts if isinstance(part, Mapping)]
    least = max((p.get("minimum", -math.inf) for p in bounds), default=-math.inf)
    most = min((p.get("maximum", math.inf) for p in bounds), default=math.inf)
    is_integer = _is_integer(parts)
    text = begun.decode("ascii", "replace").strip()
    if not is_integer or not text.lstrip("-").isdigit():
        # A number that is not whole may have an exponent: only its sign is sure.
        is_negative = text.startswith("-")
        return least <= 0 if is_negative else most >= 0
    first = abs(int(text))
    for exponent in range(MAX_EXPONENT if first else 1):
        low, high = first * 10**exponent, (first + 1) * 10**exponent - 1
        if text.startswith("-"):
            low, high = -high, -low
        if low <= most and high >= least:
            return True
    return False


def _members_fit(parts: list[Any], begun: bytes) -> bool:
    """Whether the members of an open object may match what ``parts`` say of them."""
    described = [p["properties"] for p in parts if isinstance(p.get("properties"), Mapping)]
    if not described:
        return True
    for key, value, is_closed in _members(begun):
        schemas = [properties[key] for properties in described if key in properties]
        if is_closed:
            found = json.loads(value)
            # Others than those of ``contains`` are the grammar's.
            if not all(_matches_if_read(schema, found) for schema in schemas):
                return False
        elif schemas and value and not can_become(schemas, value):
            return False
    return True


def _matches_if_read(schema: Any, value: Any) -> bool:
    try:
        return matches(schema, value)
    except (TypeError, ValueError, AttributeError):
        return True


def _members(begun: bytes) -> list[tuple[str, bytes, bool]]:
    """Return key, text and whether it is closed of each member that has begun in an object's text."""
    found, depth, start, key = [], 0, 1, ""
    in_text = is_escaped = False
    for pos in range(1, len(begun)):
        byte = begun[pos]
        if in_text:
            if is_escaped or byte == ord("\\"):
                is_escaped = not is_escaped
            elif byte == ord('"'):
                in_text = False
        elif byte == ord('"'):
            in_text = True
        elif byte in b"[{":
            depth += 1
        elif byte in b"]}" and depth:
            depth -= 1
        elif not depth and byte == ord(":"):
            key, start = json.loads(begun[start:pos]), pos + 1
        elif not depth and byte in b",}":
            found.append((key, begun[start:pos].strip(), True))
            key, start = "", pos + 1
    if key:
        found.append((key, begun[start:].strip(), False))
    return found
