"""Walking through JSON schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ("subschemas",)

SINGLE = ("additionalProperties", "additionalItems", "contains", "else", "if", "not", "propertyNames",
       "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPPINGS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, schema)`` for ``schema`` itself (``$``) and every schema inside it.

    Values of ``const``, ``enum``, ``default`` and the like are data and not visited.
    """
    stack: list[tuple[str, Any]] = [("$", schema)]
    while stack:
        path, current = stack.pop()
        yield path, current
        if not isinstance(current, Mapping):
            continue
        inner: list[tuple[str, Any]] = [(f"{path}.{k}", current[k]) for k in SINGLE if k in current]
        for keyword in LISTS:
            parts = current.get(keyword)
            if isinstance(parts, list):
                inner += [(f"{path}.{keyword}[{i}]", part) for i, part in enumerate(parts)]
        items = current.get("items")
        if isinstance(items, list):
            inner += [(f"{path}.items[{i}]", part) for i, part in enumerate(items)]
        elif items is not None:
            inner.append((f"{path}.items", items))
        for keyword in MAPPINGS:
            parts = current.get(keyword)
            if isinstance(parts, Mapping):
                inner += [(f"{path}.{keyword}.{name}", part) for name, part in parts.items()]
        stack.extend(reversed(inner))
