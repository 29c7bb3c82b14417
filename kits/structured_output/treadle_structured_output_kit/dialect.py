"""What patterns of requests mean, written so that every library understands it alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from treadle.api.types import GrammarSpec
from treadle_structured_output_kit.json_schema import subschemas

__all__ = ("ascii_classes", "plain", "without_anchors")

CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}


def plain(spec: GrammarSpec) -> GrammarSpec:
    """Return ``spec`` with patterns that mean the same to every library.

    A regex has no anchors around it, and its digits are those of ASCII. Patterns of JSON schemas are
    JavaScript's, whose digits and letters are those of ASCII.
    """
    if spec.kind == "regex":
        return replace(spec, source=ascii_classes(without_anchors(spec.source), "d"))
    if spec.kind != "json_schema":
        return spec
    schema = json.loads(spec.source)
    for _, part in subschemas(schema):
        if isinstance(part, dict) and isinstance(part.get("pattern"), str):
            part["pattern"] = ascii_classes(part["pattern"], "dw")
    return replace(spec, source=json.dumps(schema, ensure_ascii=False))


def without_anchors(pattern: str) -> str:
    """The pattern without anchors around it: it matches the whole output anyway, and some libraries
    know no anchors."""
    opened = pattern.startswith("^")
    closed = pattern.endswith("$") and list(_parts(pattern))[-1][0] == "$"
    if not (opened or closed) or any(
        part == "|" and not depth and not inside for part, inside, depth in _parts(pattern)
    ):
        return pattern  # or anchors that belong to one branch only
    return pattern[opened : len(pattern) - closed]


def ascii_classes(pattern: str, names: str) -> str:
    """``\\d`` and ``\\w``, as far as ``names`` has them, as sets of ASCII. Libraries differ in what
    else is a digit, and whoever validates the output may differ again."""
    found = []
    for part, inside, _ in _parts(pattern):
        if len(part) == 2 and part[1] in names and part[1] in CLASSES:
            part = CLASSES[part[1]] if inside else f"[{CLASSES[part[1]]}]"
        found.append(part)
    return "".join(found)


def _parts(pattern: str) -> Iterator[tuple[str, bool, int]]:
    """``(character or escape, whether it stands in a class, brackets that are open)``."""
    depth, inside, at = 0, False, 0
    while at < len(pattern):
        part = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        yield part, inside, depth
        if inside:
            inside = part != "]"
        elif part == "[":
            inside = True
        elif part in ("(", ")"):
            depth += 1 if part == "(" else -1
        at += len(part)
