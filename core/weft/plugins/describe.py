"""What one plugin is made of, for ``weft plugin show``: this imports it."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.plugins.entries import Entry
from weft.plugins.options import options_struct
from weft.plugins.registry import Registry

__all__ = ("Description", "OptionRow", "describe")


class OptionRow(msgspec.Struct, frozen=True):
    """One option as a user sets it."""

    flag: str
    type: str
    default: str
    description: str


class Description(msgspec.Struct, frozen=True):
    """One loaded plugin. ``wrappers`` are hooks that it wraps instead of answering them."""

    id: str
    distribution: str
    version: str
    target: str
    hooks: list[str]
    wrappers: list[str]
    options: list[OptionRow]


def describe(registry: Registry, kind: str, key: str) -> Description:
    """Load the plugin that serves ``kind:key``. Raises as ``Registry.load`` does."""
    entry = registry.choose(kind, key)
    plugin = registry.load(kind, key)
    plain, wrappers = registry.hooks_of(plugin)
    return Description(
        id=entry.id,
        distribution=entry.dist,
        version=entry.version,
        target=str(entry.file or entry.target),
        hooks=plain,
        wrappers=wrappers,
        options=_options(plugin, entry),
    )


def _options(plugin: object, entry: Entry) -> list[OptionRow]:
    struct = options_struct(plugin, entry.kind, entry.key)
    if struct is None:
        return []
    schema = msgspec.json.schema(struct)["$defs"]
    properties: dict[str, Any] = next(iter(schema.values()))["properties"]
    return [
        OptionRow(
            flag=f"--plugin.{entry.kind}.{entry.key}.{name}",
            type=_type(field),
            default="(required)" if "default" not in field else _json(field["default"]),
            description=field.get("description", ""),
        )
        for name, field in properties.items()
    ]


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " | ".join(_type(arm) for arm in field["anyOf"])
    if "enum" in field:
        return " | ".join(map(_json, field["enum"]))
    return str(field.get("type") or field.get("$ref", "any").rpartition("/")[2])


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
