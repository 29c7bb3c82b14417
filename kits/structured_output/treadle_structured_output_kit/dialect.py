"""What patterns of requests mean, written so that every library understands it alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

from treadle.api.types import GrammarSpec
from treadle_structured_output_kit.json_schema import subschemas

__all__ = ("ascii_classes", "normalize_patterns", "whole_text", "without_anchors")

CONTEXT = frozenset(f"\\{letter}" for letter in "bBkc0123456789")
"""Escapes of what was found before, or of the place where it is."""
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
EMPTY_SET = re.compile(r"(?<!\\)\[\^?\]")
ANYTHING = "(?s:.*)"
SPACES = " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""What is a space in JavaScript and elsewhere, and no control character, which a JSON text escapes."""
CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": SPACES}


def normalize_patterns(spec: GrammarSpec) -> GrammarSpec:
    """Return ``spec`` with patterns that mean the same to every library.

    A regex has no anchors around it, and its digits are those of ASCII. Patterns of JSON schemas are
    JavaScript's, whose digits and letters are those of ASCII.
    """
    if spec.kind == "regex":
        return replace(spec, source=ascii_classes(without_anchors(spec.source), "d"))
    if spec.kind != "json_schema":
        return spec
    schema = json.loads(spec.source)
    for _, subschema in subschemas(schema):
        if isinstance(subschema, dict) and isinstance(subschema.get("pattern"), str):
            subschema["pattern"] = ascii_classes(subschema["pattern"], "dw")
    return replace(spec, source=json.dumps(schema, ensure_ascii=False))


def without_anchors(pattern: str) -> str:
    """The pattern without anchors around it: it matches the whole output anyway, and some libraries
    know no anchors."""
    has_start = pattern.startswith("^")
    has_end = pattern.endswith("$") and list(_parts(pattern))[-1][0] == "$"
    if not (has_start or has_end) or any(
        token == "|" and not depth and not in_class for token, in_class, depth in _parts(pattern)
    ):
        return pattern  # or anchors that belong to one branch only
    return pattern[has_start : len(pattern) - has_end]


def whole_text(pattern: str) -> str:
    """The pattern of all texts in which ``pattern`` of a JSON schema is found, for libraries that match
    whole texts. Raises ``ValueError`` for what such a library cannot tell: what stands around a place."""
    branches, outline = [[""]], ""
    for token, in_class, depth in _parts(ascii_classes(pattern, "dw")):
        if token == "|" and not depth and not in_class:
            branches.append([""])
        elif in_class and token in ("[", "&", "~"):  # which would be sets of sets
            branches[-1].append("\\" + token)
        else:
            branches[-1].append({"\n": r"\n", r"\<": "<", r"\>": ">"}.get(token, token))
        outline += "x" if in_class else token[0]
    found = []
    for tokens in branches:
        has_start, has_end = tokens[:2] == ["", "^"], tokens[-1] == "$"
        body = "".join(tokens[2 if has_start else 0 : len(tokens) - has_end])
        is_anchored = any(t in ("^", "$") and not in_class for t, in_class, _ in _parts(body))
        if is_anchored or any(t in CONTEXT for t in tokens):
            raise ValueError(pattern)
        head, tail = ("" if is_there else ANYTHING for is_there in (has_start, has_end))
        found.append(f"{head}(?:{body}){tail}")
    if LOOK_AROUND.search(outline) or EMPTY_SET.search(pattern):
        raise ValueError(pattern)
    return "|".join(found)


def ascii_classes(pattern: str, names: str) -> str:
    """``\\d`` and ``\\w``, as far as ``names`` has them, as sets of ASCII, and ``\\s`` as the spaces of all. Libraries differ
    in what else is a digit, and whoever validates the output may differ again."""
    tokens = []
    for token, in_class, _ in _parts(pattern):
        if len(token) == 2 and token[1] in names and token[1] in CLASSES:
            token = CLASSES[token[1]] if in_class else f"[{CLASSES[token[1]]}]"
        tokens.append(token)
    return "".join(tokens)


def _parts(pattern: str) -> Iterator[tuple[str, bool, int]]:
    """``(character or escape, whether it stands in a class, brackets that are open)``."""
    depth, in_class, pos = 0, False, 0
    while pos < len(pattern):
        token = pattern[pos : pos + 2] if pattern[pos] == "\\" else pattern[pos]
        yield token, in_class, depth
        if in_class:
            in_class = token != "]"
        elif token == "[":
            in_class = True
        elif token in ("(", ")"):
            depth += 1 if token == "(" else -1
        pos += len(token)
