"""Schemas that say the same with keywords that a grammar can hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from treadle_structured_output_kit.apart import Apart, conjuncts, types_left
from treadle_structured_output_kit.drafts import draft_of, map_children, modernize
from treadle_structured_output_kit.formats import FORMATS, PATTERNS, UNKNOWN_TO_GRAMMARS
from treadle_structured_output_kit.negation import Inexpressible, Negation, all_of, any_of

__all__ = ("rewrite",)

MAX_OPTIONS = 64
MAX_NEGATIONS = 24 * 23


def rewrite(schema: Any) -> Any:
    """An equivalent of ``schema`` with as little of ``oneOf``, ``not``, ``if``, ``dependencies``,
    ``propertyNames``, numbers of properties, and formats as can be.

    What has no equivalent stays as it is, for the backend to refuse. Dates get a pattern that knows
    the lengths of months.
    """
    current = modernize(schema)
    return _Rewriter(current).rewrite(current)


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._negation = Negation(root)
        self._apart = Apart(self._negation.resolve)
        self._draft = draft_of(root)

    def rewrite(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        new = dict(schema)
        if not any(name.startswith("unevaluated") for name in new):  # they look at the keywords
            conditions: list[Any] = []
            for name, rule in RULES.items():
                if name in new and self._draft >= SINCE.get(name, 0):
                    try:
                        replaced, condition = rule(self, new)
                    except (Inexpressible, RecursionError, TypeError, AttributeError):
                        continue  # it stays as it is
                    new, conditions = replaced, [*conditions, *condition]
            conditions = [c for c in conditions if c is not True and c != {}]
            if conditions:
                if any(c is False for c in conditions):
                    return False
                new = _with(new, conditions)
        return map_children(new, self.rewrite)

    # Each rule returns the schema without its keyword, and the conditions that replace it.

    def _not(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        rest = _less(schema, "not")
        types = types_left([_near(rest)], self._negation.resolve)
        return rest, [self._negation.of(schema["not"], types)]

    def _if(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        condition = schema["if"]
        then, otherwise = schema.get("then", True), schema.get("else", True)
        rest = _less(schema, "if", "then", "else")
        if then is True and otherwise is True:
            return rest, []
        types = types_left([_near(rest)], self._negation.resolve)
        negated = self._negation.of(condition, types)
        return rest, [any_of([all_of([condition, then]), all_of([negated, otherwise])])]

    def _dependencies(
        self, schema: dict[str, Any], *names: str
    ) -> tuple[dict[str, Any], list[Any]]:
        conditions = []
        for name in names or ("dependencies",):
            for key, value in schema.get(name, {}).items():
                names_ = [value] if isinstance(value, str) else value
                then = {"required": names_} if isinstance(names_, list) else value
                if then == {"required": []} or then is True or then == {}:
                    continue
                lacks = {"properties": {key: False}}
                has = {"required": [key]}
                conditions.append(any_of([lacks, all_of([has, then])]))
        if math.prod([2] * len(conditions)) > MAX_OPTIONS:
            raise Inexpressible
        return _less(schema, *(names or ("dependencies",))), conditions

    def _dependent_required(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        return self._dependencies(schema, "dependentRequired")

    def _dependent_schemas(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        return self._dependencies(schema, "dependentSchemas")

    def _one_of(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        branches, rest = schema["oneOf"], _less(schema, "oneOf")
        near = _near(rest)
        options, num_negations = [], 0
        for i, branch in enumerate(branches):
            others = [
                other
                for j, other in enumerate(branches)
                if i != j and not self._apart([branch, near], [other, near])
            ]
            num_negations += len(others)
            if num_negations > MAX_NEGATIONS:
                raise Inexpressible
            types = types_left([branch, near], self._negation.resolve)
            options.append(all_of([branch, *(self._negation.of(o, types) for o in others)]))
        return rest, [any_of(options)]

    def _property_names(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        names, rest = schema["propertyNames"], _less(schema, "propertyNames")
        if names is True or names == {} or names == {"type": "string"}:
            return rest, []
        if names is False:
            return rest, [{"maxProperties": 0}]
        keys = set(names) - {"type", "description", "title", "$comment"}
        if names.get("type", "string") != "string" or len(keys) != 1:
            raise Inexpressible
        if keys == {"enum"} or keys == {"const"}:
            allowed = names["enum"] if "enum" in names else [names["const"]]
            known = {key: True for key in allowed if isinstance(key, str)}
            return rest, [{"properties": known, "additionalProperties": False}]
        if keys == {"pattern"}:
            pattern = {"patternProperties": {names["pattern"]: True}}
            return rest, [{**pattern, "additionalProperties": False}]
        raise Inexpressible

    def _num_properties(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        names = list(schema.get("properties", {}))
        low, high = schema.get("minProperties", 0), schema.get("maxProperties", len(names))
        required = [name for name in schema.get("required", []) if name in names]
        is_closed = schema.get("additionalProperties") is False and not schema.get(
            "patternProperties"
        )
        conditions: list[Any] = []
        rest = dict(schema)
        if low <= len(set(schema.get("required", []))):
            rest = _less(rest, "minProperties")
        elif is_closed:
            free = [name for name in names if name not in required]
            conditions.append(_choose(free, low - len(required), lambda some: {"required": some}))
            rest = _less(rest, "minProperties")
        if is_closed:
            num_absent = max(0, len(names) - high)
            free = [name for name in names if name not in required]
            if num_absent:
                conditions.append(
                    _choose(free, num_absent, lambda s: {"properties": dict.fromkeys(s, False)})
                )
            rest = _less(rest, "maxProperties")
        kept = [c for c in conditions if c is not False]
        if len(kept) != len(conditions):  # no object has so few or so many
            conditions = [any_of({"type": t} for t in OTHERS)]
        elif kept:  # the keywords say nothing about other values
            is_object = schema.get("type") == "object"
            conditions = kept if is_object else [any_of([*_others(), all_of(kept)])]
        return rest, conditions

    def _format(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        name = schema["format"]
        if name not in FORMATS:
            return _less(schema, "format"), []
        rest = _less(schema, "format") if name in UNKNOWN_TO_GRAMMARS else schema
        return rest, [{"pattern": PATTERNS[name]}] if name in PATTERNS else []

    def _unique(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        if schema["uniqueItems"] is False or schema.get("maxItems", 2) <= 1:
            return _less(schema, "uniqueItems"), []
        items = schema.get("items", True)
        if isinstance(items, list) or "prefixItems" in schema:
            return schema, []
        # No more items than there are values for them: what checks them has no dead end there.
        counts = [
            len(part["enum"]) if "enum" in part else 2
            for part in conjuncts([items], self._negation.resolve)
            if isinstance(part, Mapping) and ("enum" in part or part.get("type") == "boolean")
        ]
        sizes = [*counts, schema["maxItems"]] if "maxItems" in schema else counts
        return {**schema, "maxItems": min(sizes)} if sizes else schema, []


Rule = Callable[[_Rewriter, dict[str, Any]], tuple[dict[str, Any], list[Any]]]
# In older drafts these say nothing. Whoever writes them means something: they stay, for the backend
# to refuse.
SINCE = {"propertyNames": 6, "if": 7, "dependentRequired": 8, "dependentSchemas": 8}
# Conditions that may stand among other keywords and change the meaning of none.
INLINE = frozenset({"anyOf", "type", "required", "pattern", "enum", "const", "maxProperties"})
OTHERS = ("null", "boolean", "number", "string", "array")
RULES: dict[str, Rule] = {
    "format": _Rewriter._format,
    "uniqueItems": _Rewriter._unique,
    "propertyNames": _Rewriter._property_names,
    "minProperties": _Rewriter._num_properties,
    "maxProperties": _Rewriter._num_properties,
    "dependencies": _Rewriter._dependencies,
    "dependentRequired": _Rewriter._dependent_required,
    "dependentSchemas": _Rewriter._dependent_schemas,
    "if": _Rewriter._if,
    "not": _Rewriter._not,
    "oneOf": _Rewriter._one_of,
}


def _choose(names: list[str], count: int, condition: Callable[[list[str]], Any]) -> Any:
    """Any ``count`` of ``names`` meet ``condition``."""
    if math.comb(len(names), count) > MAX_OPTIONS:
        raise Inexpressible
    return any_of(condition(list(some)) for some in itertools.combinations(names, count))


def _others() -> list[Any]:
    return [{"type": name} for name in OTHERS]


def _near(schema: dict[str, Any]) -> dict[str, Any]:
    """What else is said of a value: it holds for every branch, and helps to tell them apart."""
    return _less(schema, "anyOf", "allOf", "oneOf", "not", "if")


def _less(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in names}


def _with(schema: dict[str, Any], conditions: list[Any]) -> dict[str, Any]:
    """``schema`` and ``conditions``, in it if there is room for them."""
    (first, *others) = conditions
    if not others and set(first) <= INLINE - schema.keys():
        return {**schema, **first}
    return {**schema, "allOf": [*schema.get("allOf", []), *conditions]}
