"""Small repairs of regexes that all libraries understand alike then."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ("ascii_classes", "brackets", "without_anchors")

CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}


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


def brackets(text: str) -> int:
    """The deepest nesting of brackets, also of those that stand in quotes."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


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
