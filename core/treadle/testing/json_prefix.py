"""Whether a text is the beginning of a JSON value: what streamed arguments of tool calls must be."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ("is_json_prefix",)

_token = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)
# What may complete a text whose brackets are closed afterwards: nothing, a value, a key, the rest of
# a word, of a number or of an escape.
ENDINGS = (
    *("", "0", ":0", '"":0', '"', '":0'),
    *("rue", "ue", "e", "alse", "lse", "se", "ull", "ll", "l"),
    *(f'{escape}"{after}' for escape in ("n", "0", "00", "000", "0000") for after in ("", ":0")),
)


def is_json_prefix(text: str) -> bool:
    """Return whether ``text`` can be continued to valid JSON, which is strict: no ``NaN``, and no
    control characters in strings."""
    closers: list[str] = []
    for token in _token.findall(text):
        if token in "{[":
            closers.append("}" if token == "{" else "]")
        elif token in "}]" and (not closers or closers.pop() != token):
            return False
    closing = "".join(reversed(closers))
    return any(_is_json(text + ending + closing) for ending in ENDINGS)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
