"""Schemas that llguidance takes, and then does not let every valid value through."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ("unreachable_reason",)

MAX_PRODUCT = 4_000
# Words between separators, a limited number of them: a group with two unbounded repeats.
COUNTED_GROUP = re.compile(r"\((?:\?:)?[^()]*[+*][^()]*[+*][^()]*\)(?:[+*]|\{\d*(?:,(\d*))?\})")


def unreachable_reason(schema: Mapping[str, Any]) -> str | None:
    """Why some values that match ``schema`` cannot be written, or ``None``.

    The library follows a pattern and a length at once only as far as its budget for finding out
    whether any text is left goes. Beyond it, no text is.
    """
    pattern = schema.get("pattern")
    sizes = [schema.get(name, 0) for name in ("minLength", "maxLength")]
    size = max((size for size in sizes if isinstance(size, (int, float))), default=0)
    if not isinstance(pattern, str):
        return None
    for group in COUNTED_GROUP.finditer(pattern):
        if max(int(group[1] or 0), 2) * size > MAX_PRODUCT:
            return f"the pattern {pattern} with texts of up to {size} characters"
    return None
