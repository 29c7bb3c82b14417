"""What treadle answers to the names of options and variables of other engines: the table
``option_names.toml``. ``LLM(...)``, the command line, its file and the documentation use it."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

from treadle.errors import ConfigError

__all__ = (
    "ENVIRONMENT",
    "OptionName",
    "answers_to",
    "describe_variables",
    "option_names",
    "resolve",
    "translate",
)

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class OptionName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the table, which says what each field means."""

    ours: str | None = None
    always: str | None = None
    harmless: str | None = None
    use: str | None = None
    missing: str | None = None
    values: dict[str, str] = {}
    number: bool = False
    many: bool = False
    switch: bool = False
    server: bool = False
    short: list[str] = []
    neutral: list[Any] = []
    version: Literal["0.8", "0.24"] | None = None
    note: str = ""

    @property
    def refusal(self) -> str | None:
        """Why the option is refused; ``None`` if it is accepted."""
        return f"not built yet: {self.missing}" if self.missing else self.use and f"use {self.use}"

    @property
    def excuse(self) -> str | None:
        """Why the option is accepted without effect; ``None`` if it has one."""
        return f"always on: {self.always}" if self.always else self.harmless

    def convert(self, value: Any) -> Any:
        """Return the value in treadle's spelling, ``None`` for the default of the option."""
        text = str(value)
        if text in self.values and not isinstance(value, bool):
            return self.values[text] or None
        if self.number and isinstance(value, str) and (factor := FACTORS.get(text[-1:])):
            try:
                return int(float(text[:-1]) * factor)
            except ValueError:
                return value
        return [value] if self.many and isinstance(value, str) else value

    def asks_for_nothing(self, value: Any) -> bool:
        return not value or (value in self.neutral and not isinstance(value, bool))


@cache
def option_names() -> dict[str, dict[str, OptionName]]:
    """The table by section; that of the environment has names of variables, and patterns of them."""
    text = files("treadle").joinpath("option_names.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, dict[str, OptionName]])


@cache
def answers_to() -> dict[str, OptionName]:
    """Every option of the table, by name."""
    return {
        n: row for s, rows in option_names().items() if s != ENVIRONMENT for n, row in rows.items()
    }


def translate(
    name: str, value: Any, spell: Callable[[str], str] = "option {}".format
) -> Iterator[tuple[str, Any]]:
    """Yield treadle's name and value of an option, nothing if it has no effect; log what differs.

    ``spell`` returns a name as it was given. Raises ``ConfigError`` for what treadle does not have.
    """
    row = answers_to().get(name)
    if row is None:
        yield name, value
    elif isinstance(value, Mapping) and any(f"{name}.{key}" in answers_to() for key in value):
        for key, inner in value.items():
            yield from translate(f"{name}.{key}", inner, spell)
    elif row.refusal is not None:
        if not row.asks_for_nothing(value):
            raise ConfigError(f"{spell(name)} is {value!r}: {row.refusal}")
    elif row.excuse is not None:
        log.warning("%s has no effect: %s", spell(name), row.excuse)
    else:
        if row.ours:
            own_name = spell(row.ours).removeprefix("option ")
            log.warning("%s is accepted; its name in treadle is %s", spell(name), own_name)
        if (canonical_value := row.convert(value)) is not None:
            yield row.ours or name, canonical_value


def resolve(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under treadle's names; log and raise as ``translate`` does.

    Raises ``ConfigError`` if an option is given under two names.
    """
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        for canonical_name, canonical_value in translate(name, value):
            if canonical_name != name and (canonical_name in options or canonical_name in resolved):
                raise ConfigError(
                    f"{name} is another name of {canonical_name}; give only {canonical_name}"
                )
            resolved[canonical_name] = canonical_value
    return resolved


def describe_variables(names: list[str]) -> str | None:
    """Return a sentence about variables that treadle does not read; ``None`` if there are none."""
    rows = option_names()[ENVIRONMENT]
    parts = []
    for name in sorted(names):
        row = next((row for pattern, row in rows.items() if fnmatchcase(name, pattern)), None)
        parts.append(f"{name} ({(row.refusal or row.excuse) if row else 'not a name of vLLM'})")
    return f"treadle does not read {'; '.join(parts)}" if parts else None
