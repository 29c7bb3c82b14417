"""What plugins are made of and which options they have: this imports them."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from treadle.errors import PluginError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry
from treadle.plugins.options import options_struct
from treadle.testing.introspection import hooks_of

__all__ = ("Description", "OptionRow", "all_options", "describe")


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


def describe(plugins: PluginManager, kind: str, key: str) -> Description:
    """Load the plugin that serves ``kind:key``. Raises as ``PluginManager.load`` does."""
    entry = plugins.choose(kind, key)
    plugin = plugins.load(kind, key)
    plain, wrappers = hooks_of(plugins, plugin)
    return Description(
        id=entry.id,
        distribution=entry.dist,
        version=entry.version,
        target=entry.source,
        hooks=plain,
        wrappers=wrappers,
        options=_options(plugin, entry),
    )


def all_options(plugins: PluginManager) -> list[OptionRow]:
    """The options of every usable plugin, in the order of their names.

    Only modules whose source speaks of ``TREADLE_OPTIONS`` are imported. Plugins that are broken or
    contested are left out: ``treadle doctor`` tells of them.
    """
    rows: list[OptionRow] = []
    for kind, key in sorted({(e.kind, e.key) for e in plugins.entries if e.usable}):
        with contextlib.suppress(PluginError):
            entry = plugins.choose(kind, key)
            if _speaks_of_options(entry):
                rows += _options(plugins.load(kind, key), entry)
    return rows


def _speaks_of_options(entry: Entry) -> bool:
    """Whether the module of an entry may declare options; importing it would tell, and cost more."""
    try:
        source = Path(entry.file) if entry.file else _source(entry.target.partition(":")[0])
        return source is None or b"TREADLE_OPTIONS" in source.read_bytes()
    except (ImportError, OSError, ValueError):
        return False  # it is not there to be imported


def _source(module: str) -> Path | None:
    """The file of a module, found without importing the packages that it is in; ``None`` if it is
    none of Python source."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        below = path.parent.joinpath(*rest)
        path = below / "__init__.py" if below.is_dir() else below.with_suffix(".py")
    return path if path.suffix == ".py" and path.is_file() else None


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
