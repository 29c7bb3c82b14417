"""What a template may see of a conversation: JSON, and no object with methods of its own.

The bounds are those of msgpack, in which values travel to a template in a process of its own. They
hold in this process too, so that a conversation is refused either everywhere or nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from treadle.errors import RequestError

__all__ = ("MAX_DEPTH", "plain_json")

MAX_DEPTH = 64
SURROGATE = re.compile("[\ud800-\udfff]")


def plain_json(value: Any, param: str = "messages", depth: int = MAX_DEPTH) -> Any:
    """Return ``value`` as JSON types. Raises ``RequestError`` that names ``param``."""
    match value:
        case None | bool():
            return value
        case str():
            text = str.__str__(value)
            if not text.isascii() and SURROGATE.search(text):
                raise RequestError(f"{param} holds text with a lone surrogate", param=param)
            return text
        case int():
            if not -(2**63) <= value < 2**64:
                raise RequestError(
                    f"{param} holds an integer that needs more than 64 bits", param=param
                )
            return int(value)
        case float():
            return float(value)
        case Mapping() | list() | tuple() if not depth:
            raise RequestError(f"{param} nests more than {MAX_DEPTH} levels", param=param)
        case Mapping():
            return {
                plain_json(k, param, depth - 1): plain_json(v, param, depth - 1)
                for k, v in value.items()
            }
        case list() | tuple():
            return [plain_json(item, param, depth - 1) for item in value]
    raise RequestError(
        f"{param} holds a {type(value).__name__}; only text, numbers, booleans, lists and objects "
        "can be rendered",
        param=param,
    )
