"""The hooks and options of plugins, read from their modules."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from treadle.api.plugin_options import options_struct
from treadle.errors import PluginError
from treadle.plugins import PluginManager
from treadle.plugins.entries import Entry
from treadle.testing.introspection import hooks_of

__all__ = ("Description", "OptionRow", "all_options", "describe", "option_rows")


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
    hook_names, wrappers = hooks_of(plugins, plugin)
    return Description(
        id=entry.id,
        distribution=entry.dist,
        version=entry.version,
        target=entry.source,
        hooks=hook_names,
        wrappers=wrappers,
        options=_options(plugin, entry),
    )


def all_options(plugins: PluginManager) -> list[OptionRow]:
    """The options of every usable plugin, in the order of their names.

    Only modules that mention ``TREADLE_OPTIONS`` in their source are imported. Plugins that are broken
    or in conflict are left out: ``treadle doctor`` reports them.
    """
    rows: list[OptionRow] = []
    for kind, key in sorted({(e.kind, e.key) for e in plugins.entries if e.usable}):
        with contextlib.suppress(PluginError):
            entry = plugins.choose(kind, key)
            if _may_declare_options(entry):
                rows += _options(plugins.load(kind, key), entry)
    return rows


def _may_declare_options(entry: Entry) -> bool:
    """Whether the source of an entry's module mentions ``TREADLE_OPTIONS``; cheaper than importing it."""
    try:
        source = Path(entry.file) if entry.file else _source(entry.target.partition(":")[0])
        return source is None or b"TREADLE_OPTIONS" in source.read_bytes()
    except (ImportError, OSError, ValueError):
        return False  # the module does not exist


def _source(module: str) -> Path | None:
    """Return the file of a module without importing its parent packages.

    ``None`` if the module has no Python source file.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        module_path = path.parent.joinpath(*rest)
        path = (
            module_path / "__init__.py" if module_path.is_dir() else module_path.with_suffix(".py")
        )
    return path if path.suffix == ".py" and path.is_file() else None


def _options(plugin: object, entry: Entry) -> list[OptionRow]:
    struct = options_struct(plugin, entry.kind, entry.key)
    return [] if struct is None else option_rows(struct, entry.id)


def option_rows(struct: type[msgspec.Struct], id: str) -> list[OptionRow]:
    """Return the options that a plugin declares for ``kind:key`` by a Struct."""
    kind, _, key = id.partition(":")
    schema = msgspec.json.schema(struct)["$defs"]
    properties: dict[str, Any] = next(iter(schema.values()))["properties"]
    return [
        OptionRow(
            flag=f"--plugin.{kind}.{key}.{name}",
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
