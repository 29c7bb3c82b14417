"""What older drafts of JSON Schema write differently, written as the current one does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from treadle_structured_output_kit.json_schema import ASSERTIONS, LISTS, MAPPINGS, SINGLE

__all__ = ("draft_of", "map_children", "modernize")

NUMBERED = re.compile(r"https?://json-schema\.org/draft-0([3-7])/(?:hyper-)?schema#?")
LATEST = 9
BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


def draft_of(root: Any) -> int:
    """The number of the draft that ``root`` names; 2019-09 would be the eighth. Default: the latest."""
    dialect = root.get("$schema") if isinstance(root, Mapping) else None
    match = NUMBERED.fullmatch(dialect) if isinstance(dialect, str) else None
    return int(match[1]) if match else LATEST


def map_children(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """``schema`` with every schema that stands directly inside it changed."""
    new = dict(schema)
    for name in SINGLE:
        if name in new:
            new[name] = change(new[name])
    for name in (*LISTS, "items"):
        value = new.get(name)
        if isinstance(value, list):
            new[name] = [change(part) for part in value]
        elif name == "items" and name in new:
            new[name] = change(value)
    for name in (*MAPPINGS, "dependencies"):
        if isinstance(new.get(name), Mapping):
            new[name] = {key: change(part) for key, part in new[name].items()}
    return new


def modernize(root: Any) -> Any:
    """An equivalent of ``root`` in which ``$ref`` may have siblings, and exclusive bounds are numbers.

    Up to draft 7, whatever stands beside ``$ref`` says nothing; in draft 4, ``exclusiveMinimum`` is
    a flag of ``minimum``.
    """
    is_alone = draft_of(root) <= 7

    def change(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        new = dict(schema)
        if is_alone and isinstance(new.get("$ref"), str):
            new = {key: v for key, v in new.items() if key == "$ref" or key not in ASSERTIONS}
        for bound, exclusive in BOUNDS:
            flag = new.get(exclusive)
            if isinstance(flag, bool):
                del new[exclusive]
                if flag and bound in new:
                    new[exclusive] = new.pop(bound)
        return map_children(new, change)

    return change(root)
