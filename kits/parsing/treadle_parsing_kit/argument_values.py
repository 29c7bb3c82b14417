"""Values of arguments in formats that write a text without quotes, and any other value as JSON.

What a schema says of a text is a terminal of the grammar, which ends with what closes the argument.
``written_values`` reads what was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from treadle_parsing_kit.tool_choice import ANYWHERE, lark_string
from treadle_parsing_kit.written_values import Options, takes_text, types_in, values_of
from treadle_structured_output_kit.dialect import whole_text
from treadle_structured_output_kit.drafts import modernize
from treadle_structured_output_kit.formats import FORMATS, PLAIN_PATTERNS
from treadle_structured_output_kit.free_text import between_slashes, escaped
from treadle_structured_output_kit.json_schema import (
    ASSERTIONS,
    disjoint,
    resolve,
    subschemas,
)
from treadle_structured_output_kit.limits import unreachable_reason
from treadle_structured_output_kit.merge import Unmergeable, merge
from treadle_structured_output_kit.plain_values import listed, unreadable

__all__ = ("ArgumentSchemas", "Unenforceable")

MAX_STEPS = 20_000
"""Schemas that are read for one function, and the properties and listed values of those that are merged or are
options of one argument."""
MAX_DEPTH = 48
MAX_LEAST, MAX_MOST = 1_000, 30_000
"""Lengths of texts that llguidance counts beside the tag that closes them, with a large vocabulary."""
PARTS = ("$ref", "allOf", "anyOf", "oneOf")
SIMPLE = {
    "null": "null",
    "boolean": "true|false",
    "integer": "-?(0|[1-9][0-9]{0,17})",
    "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?",
}
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
NUMERIC = frozenset({"integer", "number"})
ANY_TYPE = frozenset({"not", "if", "$dynamicRef", "$recursiveRef"})
OF_OBJECTS = ANY_TYPE | {
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "propertyNames",
}
OPENS_JSON = r"\s*[\[{]"
NAMED = ("#/$defs/", "#/definitions/")
"""References of JSON in a grammar that holds one argument only."""


class Unenforceable(ValueError):
    """A grammar cannot hold a part of the schema. The text says which."""


class ArgumentSchemas:
    """The schemas of one function's arguments, ``properties`` by name, the names in ``required`` too.

    ``strict``: what cannot be enforced raises ``Unenforceable``. Without it, it is ignored, and so are patterns,
    of which a library may read none. Any other error means that a keyword has a value of a wrong type.
    """

    def __init__(self, root: Mapping[str, Any], *, strict: bool = False) -> None:
        self._root, self._strict, self._steps = modernize(root), strict, 0
        self._shared = {n: self._root[n] for n in ("$defs", "definitions") if n in self._root}
        whole = self._whole_object()
        self.required = list(whole.get("required") or ())
        given = whole.get("properties") or {}
        names = dict.fromkeys((*given, *self.required))
        schemas = {name: given.get(name, True) for name in names}
        self.properties = {n: s for n, s in schemas.items() if s is not False or n in self.required}
        # All at once: what is too much is so for the grammar and for who reads the values.
        self._options = {name: self._leaves(schema) for name, schema in self.properties.items()}

    def options(self, name: str) -> Options:
        """Return schemas without references and parts: a value matches one of them if it is valid. None if
        that cannot be told."""
        return self._options.get(name, [])

    def expressions(self, name: str, close: str) -> tuple[str, str]:
        """Return Lark expressions of a value: a terminal of what is written as a text, without ``close`` in
        it, and a rule of all else. ``""`` is none, and the terminal ``/(?s:.*)/`` any text."""
        options = self.options(name)
        values = list(map(values_of, options))
        pairs = list(zip(options, values, strict=True))
        texts = [option for option, found in pairs if found is None and takes_text(option)]
        has_text = texts or any(isinstance(v, str) for found in values for v in found or ())
        if not has_text or not all(found is not None or types_in(o) for o, found in pairs):
            return "", self._json(self.properties[name])
        words = [
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for option, found in pairs
            for value in self._allowed(option, found)
        ]
        others = [
            {**option, "type": kind}
            for option, found in pairs
            for kind in (types_in(option) if found is None else ())
            if kind != "string"
        ]
        if texts:
            return self._terminal(texts, words, others, escaped(close))
        for word in words:
            if close in word:
                self._give_up(f"the value {word[:64]!r}")
        parts = [*map(lark_string, words), *map(self._json, others)]
        if not parts:
            self._give_up("an enum of which no value is allowed")
            return "", self._json(self.properties[name])
        return "", " | ".join(dict.fromkeys(parts))

    def _terminal(
        self, texts: Options, words: Sequence[str], others: Options, close: str
    ) -> tuple[str, str]:
        """Return the expressions where some texts are not listed. One lexeme has them all: of two, a lexer
        would follow the longer, and not come back."""
        nested = [option for option in others if option["type"] in ("array", "object")]
        without = f" & ~/{OPENS_JSON}{ANYWHERE}/" if nested else ""
        patterns = [self._text(option) for option in texts]
        patterns += [f"/{escaped(word)}/" for word in words]
        for option in others:
            if option["type"] in SIMPLE:
                patterns.append(f"/{SIMPLE[option['type']]}/")
                rules = sorted(NUMBERS & option.keys()) if option["type"] in NUMERIC else []
                for keyword in rules:
                    self._give_up(f"{keyword} of a number that may be a text")
            elif option not in nested:
                self._give_up(f"type {option['type'][:64]!r}")
        if f"/{ANYWHERE}/" in patterns and not without:
            return f"/{ANYWHERE}/", ""
        terminal = f"({' | '.join(dict.fromkeys(patterns))}) & ~/{ANYWHERE}{close}{ANYWHERE}/"
        return f"({terminal}{without})", " | ".join(map(self._json, nested))

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Return a Lark expression of the texts that match."""
        for keyword in sorted(ANY_TYPE & schema.keys()):
            self._give_up(keyword)
        patterns, pattern, name = [], schema.get("pattern"), schema.get("format")
        if pattern is not None and self._strict:
            try:
                patterns.append(whole_text(pattern))
            except (TypeError, ValueError):
                self._give_up(f"pattern {str(pattern)[:64]!r}")
        if name in PLAIN_PATTERNS:
            patterns.append(whole_text(PLAIN_PATTERNS[name]))
        elif name in FORMATS:
            self._give_up(f"format {name}")
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        if least > MAX_LEAST or (most is not None and not least <= most <= MAX_MOST):
            self._give_up(f"a length from {least} to {most}")
            least, most = 0, None
        if (reason := unreachable_reason(schema)) is not None:
            self._give_up(reason)
        if least > 0 or most is not None:
            patterns.append(f"(?s:.{{{max(least, 0)},{'' if most is None else int(most)}}})")
        written = [f"/{between_slashes(pattern)}/" for pattern in patterns or [ANYWHERE]]
        return written[0] if len(written) == 1 else f"({' & '.join(written)})"

    def _allowed(self, schema: Mapping[str, Any], values: list[Any] | None) -> list[Any]:
        """Return the listed values that the rest of their schema allows."""
        if values is None:
            return []
        if (name := unreadable(schema)) is not None:
            self._give_up(f"{name} beside the values of an enum")
        return listed(schema)

    def _json(self, schema: Any) -> str:
        pointers = _pointers(schema)
        for pointer in {*map(str, pointers), *(self._shared_pointers if pointers else ())}:
            if not pointer.startswith(NAMED):
                self._give_up(f"$ref {pointer[:64]!r}")
            elif self._strict:
                self._target({"$ref": pointer})
        if not isinstance(schema, Mapping):
            return "%json {}"
        layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        own = {name: value for name, value in schema.items() if name not in self._shared}
        own["x-guidance"] = {**layout, "lenient": not self._strict}
        shared = f", {self._shared_text[1:]}" if pointers and self._shared else "}"
        return f"%json {json.dumps(own)[:-1]}{shared}"

    @cached_property
    def _shared_text(self) -> str:
        return json.dumps(self._shared)

    @cached_property
    def _shared_pointers(self) -> frozenset[str]:
        return frozenset(map(str, _pointers(self._shared)))

    def _whole_object(self) -> Mapping[str, Any]:
        """Return the schema of the whole without references and parts."""
        root: Mapping[str, Any] = self._root
        whole = root
        if part := next((name for name in PARTS if name in root), None):
            leaves = self._leaves(root)
            if len(leaves) == 1:
                whole = leaves[0]
            else:
                self._give_up(part)
        for keyword in sorted(OF_OBJECTS & whole.keys()):
            self._give_up(keyword)
        least, most = whole.get("minProperties", 0), whole.get("maxProperties")
        if least > len(whole.get("required") or ()):
            self._give_up("minProperties")
        if most is not None and most < len(whole.get("properties") or ()):
            self._give_up("maxProperties")
        return whole

    def _leaves(self, schema: Any) -> Options:
        try:
            return self._flat(schema, 0)
        except Unenforceable:
            return []

    def _flat(self, schema: Any, depth: int) -> Options:
        if not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        name = next((name for name in PARTS if name in schema), None)
        if name is None:
            return [schema]
        self._count(1 if name == "$ref" else len(schema[name]))
        if depth > MAX_DEPTH:
            raise Unenforceable("too many references and options")
        rest = {key: value for key, value in schema.items() if key != name}
        try:
            if name == "$ref":
                return self._flat(self._merge(rest, self._target(schema)), depth + 1)
            if name == "allOf":
                for part in schema[name]:
                    rest = self._merge(rest, self._whole(part))
                return self._flat(rest, depth + 1)
            options = [self._whole(option) for option in schema[name]]
            if name == "oneOf":  # each is compared with all others
                self._count(len(options) * sum(map(_size, options)))
                if not disjoint(options):
                    raise Unenforceable("oneOf")
            if rest.keys() & ASSERTIONS:
                options = [self._merge(rest, option) for option in options]
        except Unmergeable as error:
            raise Unenforceable(f"{name} with {error}") from error
        leaves: list[Mapping[str, Any]] = []
        for option in options:
            found = self._flat(option, depth + 1)
            self._count(sum(map(_size, found)))
            leaves += found
        return leaves

    def _merge(self, left: Mapping[str, Any], right: Any) -> Any:
        self._count(_size(left) + _size(right))
        return merge(left, right) if left.keys() & ASSERTIONS else right

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise Unenforceable("too many references and options")

    def _whole(self, part: Any) -> Any:
        is_reference = isinstance(part, Mapping) and part.keys() & ASSERTIONS == {"$ref"}
        return self._target(part) if is_reference else part

    def _target(self, schema: Mapping[str, Any]) -> Any:
        try:
            return resolve(self._root, schema["$ref"])
        except LookupError:
            raise Unenforceable(f"$ref {str(schema['$ref'])[:64]!r}") from None

    def _give_up(self, name: str) -> None:
        if self._strict:
            raise Unenforceable(name)


def _size(schema: Any) -> int:
    """Return how much there is to read where a schema is merged, or is an option."""
    parts = schema if isinstance(schema, Mapping) else {}
    return 1 + sum(len(parts.get(name) or ()) for name in ("enum", "properties", "required"))


def _pointers(schema: Any) -> list[Any]:
    """Return all references in a schema."""
    parts = (part for _, part in subschemas(schema))
    return [part["$ref"] for part in parts if isinstance(part, Mapping) and "$ref" in part]
