"""The options of one plugin, checked by the plugin's own Struct.

A plugin module may declare ``TREADLE_OPTIONS = {"quantization:awq": AWQOptions}``, where the value is
a frozen ``msgspec.Struct`` with defaults (the key may end in ``*``). Its hooks then receive all
fields with their types; without a declaration they receive what the user wrote.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from treadle.api.plugin_kind import FALLBACK
from treadle.errors import ConfigError, PluginLoadError

__all__ = ("check_options", "declared_options", "options_struct")


def declared_options(plugin: object) -> Mapping[str, type[msgspec.Struct]]:
    """``TREADLE_OPTIONS`` of a plugin object or of its module. Raises ``PluginLoadError`` if misused."""
    module = sys.modules.get(type(plugin).__module__)
    table = (
        getattr(plugin, "TREADLE_OPTIONS", None) or getattr(module, "TREADLE_OPTIONS", None) or {}
    )
    if not isinstance(table, Mapping):
        raise PluginLoadError(
            f"TREADLE_OPTIONS must be a dict of kind:key to a msgspec.Struct, not {table!r}"
        )
    for name, struct in table.items():
        if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
            raise PluginLoadError(
                f"TREADLE_OPTIONS[{name!r}] must be a msgspec.Struct class, not {struct!r}"
            )
    return table


def options_struct(plugin: object, kind: str, key: str) -> type[msgspec.Struct] | None:
    """The Struct that a plugin declares for one key."""
    table = declared_options(plugin)
    return table.get(f"{kind}:{key}") or table.get(f"{kind}:{FALLBACK}")


def check_options(
    plugin: object, kind: str, key: str, given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options to pass to a hook. Raises ``ConfigError`` with the option and its path."""
    struct = options_struct(plugin, kind, key)
    if struct is None:
        return dict(given)
    unknown = sorted(set(given) - set(struct.__struct_encode_fields__))
    if unknown:
        known = struct.__struct_encode_fields__
        nearest = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        names = ", ".join(known) or "none"
        raise ConfigError(f"{kind}:{key} has no option {unknown[0]!r}; its options: {names}{hint}")
    try:
        return msgspec.structs.asdict(msgspec.convert(given, struct, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(_located(error, kind, key, given)) from error


def _located(error: msgspec.ValidationError, kind: str, key: str, values: Mapping[str, Any]) -> str:
    message, _, path = str(error).partition(" - at `$.")
    if not path:
        return f"options of {kind}:{key}: {message}"
    path = path.rstrip("`")
    value = values.get(path.partition(".")[0].partition("[")[0])
    return f"option --plugin.{kind}.{key}.{path} is {value!r}: {message}"
