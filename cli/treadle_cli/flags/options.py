"""What a command was given: the flags over the file, by the Structs that they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from treadle.config import EngineConfig, from_options
from treadle.errors import ConfigError, RequestError
from treadle.plugins import installed_kinds
from treadle_cli.flags.groups import ENGINE, Group
from treadle_cli.flags.types import choices_of
from treadle_cli.rewrite import PREFIX

__all__ = ("Options", "plugin_options")

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Options:
    """Options that were given; what is absent keeps the default of its Struct."""

    values: Mapping[str, Any]

    def of(self, groups: Iterable[Group]) -> dict[str, Any]:
        """The options of some groups, by name."""
        names = {name for group in groups for name in group.names()}
        return {name: value for name, value in self.values.items() if name in names}

    def engine(self, **defaults: Any) -> dict[str, Any]:
        """The engine's options, checked. ``defaults`` stand where the user said nothing."""
        found = {**defaults, **self.of(ENGINE)}
        from_options(found)
        return found

    def engine_config(self, **defaults: Any) -> EngineConfig:
        return from_options({**defaults, **self.of(ENGINE)})

    def struct(self, group: Group, **defaults: Any) -> Any:
        """The Struct of one group. Raises ``ConfigError`` or the error of the Struct itself."""
        found = {**defaults, **self.of([group])}
        try:
            return msgspec.convert(found, group.struct)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from error
            message, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`").partition("[")[0].partition(".")[0]
            shown = f"option {name} is {found.get(name)!r}: {message}" if name else message
            raise ConfigError(shown + _allowed(group, name)) from error


def _allowed(group: Group, name: str) -> str:
    """The choices of an option that has some."""
    for found in group.fields():
        if found.name == name and (choices := choices_of(found.annotation)):
            return f" (allowed: {', '.join(choices)})"
    return ""


def plugin_options(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``["kind.key.option=value"]`` as ``{"kind:key": {"option": value}}``.

    A value is JSON where it can be, else text: the plugin's Struct converts it.
    """
    table: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        kind, _, rest = name.partition(".")
        key, _, option = rest.rpartition(".")
        if not (equals and key and option):
            raise ConfigError(f"{PREFIX}{text}: write {PREFIX}KIND.KEY.OPTION=VALUE")
        if kind not in installed_kinds():
            raise ConfigError(
                f"{PREFIX}{text}: there is no kind {kind!r}; known kinds: {', '.join(installed_kinds())}"
            )
        table.setdefault(f"{kind}:{key}", {})[option.replace("-", "_")] = _value(value)
    return table


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
