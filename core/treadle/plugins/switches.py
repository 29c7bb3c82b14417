"""What the user switched on and off: pins, disabled plugins, the allow-list.

Flags and files arrive as ``PluginConfig``, the environment through ``config.environment``; both
are merged here and applied to the entries once, before anything is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.config import PluginConfig, environment
from treadle.errors import ConfigError
from treadle.known_plugins import ALWAYS_ALLOWED, DISTRIBUTIONS
from treadle.plugins.entries import Entry, normal
from treadle.plugins.kinds import check_known, installed_kinds

__all__ = ("Switches",)


@dataclass(frozen=True, slots=True)
class Switches:
    """Which entries may be used and who owns a contested key."""

    pins: Mapping[str, str] = field(default_factory=dict)
    disabled: Collection[str] = ()
    allowed: Collection[str] = ()
    autoload: bool = True
    strict: bool = False

    @classmethod
    def read(cls, config: PluginConfig) -> Switches:
        """Merge the configuration with the environment. Raises ``ConfigError`` for a bad pin."""
        variables: dict[str, Any] = environment()
        return cls(
            pins=dict(_pin(text) for text in config.pin_plugin),
            disabled=frozenset(map(_normalize, [*config.disable_plugin, *variables["disable"]])),
            allowed=frozenset(map(_normalize, variables["allow"])),
            autoload=variables["autoload"],
            strict=config.plugin_strict or variables["strict"],
        )

    def apply(self, entries: Iterable[Entry]) -> None:
        """Close every entry that the user does not want."""
        for entry in entries:
            names = {entry.id, normal(entry.dist)}
            if names & set(self.disabled):
                entry.close("disabled", "disabled by --disable-plugin or TREADLE_DISABLED_PLUGINS")
            elif entry.file is not None or normal(entry.dist) in ALWAYS_ALLOWED:
                continue
            elif self.allowed and not names & set(self.allowed):
                entry.close("disabled", "not in the allow-list TREADLE_PLUGINS")
            elif not self.autoload and normal(entry.dist) not in DISTRIBUTIONS:
                entry.close("disabled", "a third party's, and TREADLE_PLUGIN_AUTOLOAD is 0")


def _pin(text: str) -> tuple[str, str]:
    name, _, dist = text.partition("=")
    kind, _, key = name.partition(":")
    if not (key and dist):
        raise ConfigError(
            f"--pin-plugin is {text!r}; write kind:key=distribution, as in quantization:awq=treadle-awq"
        )
    check_known(kind, installed_kinds(), f"--pin-plugin is {text!r}")
    return name, dist


def _normalize(name: str) -> str:
    return name if ":" in name else normal(name)
