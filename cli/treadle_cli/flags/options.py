"""The options of a command: flags over the configuration file, by Struct."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from treadle.config import EngineConfig, from_options
from treadle.errors import ConfigError, RequestError
from treadle.plugins.kinds import check_known, installed_kinds
from treadle_cli.flags.groups import ENGINE, Group
from treadle_cli.flags.types import choices_of
from treadle_cli.rewrite import PREFIX

__all__ = ("Options", "plugin_options")

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Options:
    """The options that the user set; absent ones keep the default of their Struct."""

    values: Mapping[str, Any]

    def of(self, groups: Iterable[Group]) -> dict[str, Any]:
        """The options of some groups, by name."""
        names = {name for group in groups for name in group.names()}
        return {name: value for name, value in self.values.items() if name in names}

    def engine(self, **defaults: Any) -> dict[str, Any]:
        """Return the engine's options, checked. ``defaults`` apply to options that the user did not set."""
        values = {**defaults, **self.of(ENGINE)}
        _checked(from_options(values))
        return values

    def engine_config(self, **defaults: Any) -> EngineConfig:
        return _checked(from_options({**defaults, **self.of(ENGINE)}))

    def struct(self, group: Group, **defaults: Any) -> Any:
        """The Struct of one group. Raises ``ConfigError`` or the error of the Struct itself."""
        values = {**defaults, **self.of([group])}
        try:
            return msgspec.convert(values, group.struct)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from error
            message, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`").partition("[")[0].partition(".")[0]
            text = f"option {name} is {values.get(name)!r}: {message}" if name else message
            raise ConfigError(text + _allowed(group, name)) from error


def _checked(config: EngineConfig) -> EngineConfig:
    """Return ``config``. Raises ``PluginConflictError`` if installed code is not the locked one."""
    if config.plugins.plugin_lock_file is not None:
        from treadle.plugins import PluginManager

        PluginManager(config.plugins)
    return config


def _allowed(group: Group, name: str) -> str:
    """Return the allowed values of an option as text, ``""`` if it has no fixed choices."""
    for field in group.fields():
        if field.name == name and (choices := choices_of(field.annotation)):
            return f" (allowed: {', '.join(choices)})"
    return ""


def plugin_options(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``["kind.key.option=value"]`` as ``{"kind:key": {"option": value}}``.

    A value is JSON if it can be parsed as such, else text: the plugin's Struct converts it.
    """
    table: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        kind, _, rest = name.partition(".")
        key, _, option = rest.rpartition(".")
        if not (equals and key and option):
            raise ConfigError(f"{PREFIX}{text}: write {PREFIX}KIND.KEY.OPTION=VALUE")
        check_known(kind, installed_kinds(), f"{PREFIX}{text}")
        table.setdefault(f"{kind}:{key}", {})[option.replace("-", "_")] = _value(value)
    return table


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
