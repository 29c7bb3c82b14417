"""One schema in place of two that hold together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle_structured_output_kit.json_schema import ASSERTIONS

__all__ = ("Unmergeable", "merge")

LOWER_BOUNDS = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems"})
UPPER_BOUNDS = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems"})


class Unmergeable(ValueError):
    """No single schema says both. The text is the keyword that does not."""


def merge(left: Any, right: Any) -> Any:
    """Return a schema that allows what both allow. Raises ``Unmergeable``."""
    if left is True or right is True:
        return right if left is True else left
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        raise Unmergeable("false")
    _check_closed(left, right)
    _check_closed(right, left)
    merged: dict[str, Any] = {**right, **left}
    for name in left.keys() & right.keys() & ASSERTIONS:
        merged[name] = _merge_keyword(name, left[name], right[name])
    return merged


def _merge_keyword(name: str, left: Any, right: Any) -> Any:
    if left == right and type(left) is type(right):
        return left
    if name == "properties":
        names = dict.fromkeys((*left, *right))
        return {n: merge(left.get(n, True), right.get(n, True)) for n in names}
    if name == "required":
        return list(dict.fromkeys((*left, *right)))
    if name in LOWER_BOUNDS:
        return max(left, right)
    if name in UPPER_BOUNDS:
        return min(left, right)
    if name in ("items", "additionalProperties"):
        return False if left is False or right is False else merge(left, right)
    if name == "type":
        return _common_types(left, right)
    if name == "allOf":
        return [*left, *right]
    raise Unmergeable(name)


def _common_types(left: Any, right: Any) -> list[str]:
    others = [right] if isinstance(right, str) else right
    types = []
    for one in [left] if isinstance(left, str) else left:
        if one in others or (one == "integer" and "number" in others):
            types.append(one)
        elif one == "number" and "integer" in others:
            types.append("integer")
    if not types:
        raise Unmergeable("type")
    return types


def _check_closed(closed: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """What one says of properties that it does not name, holds for those that the other names."""
    names = (other.get("properties") or {}).keys() - (closed.get("properties") or {}).keys()
    if names and closed.get("additionalProperties", True) is not True:
        raise Unmergeable("additionalProperties")
