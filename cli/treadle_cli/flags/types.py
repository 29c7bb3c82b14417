"""From the type of an option to what a command line can hold, and back."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

import msgspec

from treadle.errors import ConfigError

__all__ = ("choices_of", "decoded", "flag_type", "metavar")

SIMPLE = (bool, int, float, str)


def unwrap_annotated(annotation: Any) -> Any:
    """The type without ``Annotated`` and ``None``; of a union, the arm that a flag fills.

    A list beats text (``str | list[str]``: repeat the flag) and a dict beats both (JSON).
    """
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    arms = [unwrap_annotated(arm) for arm in get_args(annotation) if arm is not type(None)]
    return max(arms, key=lambda arm: (holds_json(arm), is_list(arm)))


def is_list(found: Any) -> bool:
    origin: Any = get_origin(found)
    return origin is list


def holds_json(annotation: Any) -> bool:
    """Whether the flag of this type is JSON text."""
    found = unwrap_annotated(annotation)
    if is_list(found):
        return not simple(unwrap_annotated(get_args(found)[0]))
    return not simple(found)


def simple(found: Any) -> bool:
    """Whether typer reads values of this type by itself."""
    return found in SIMPLE or get_origin(found) is Literal


def flag_type(annotation: Any) -> Any:
    """What typer is told: ``None`` stands for a flag that was not given."""
    found = str if holds_json(annotation) else unwrap_annotated(annotation)
    if is_list(found):
        item = unwrap_annotated(get_args(found)[0])
        # Typer knows no lists of choices; the Struct refuses what is none.
        found = list[str] if get_origin(item) is Literal else list[item]  # type: ignore[valid-type]
    return Optional[found]  # noqa: UP045  (a value, not an annotation)


def metavar(annotation: Any) -> str | None:
    """What stands for the value on a help page, where typer's own word is none."""
    if holds_json(annotation):
        return "JSON"
    found = unwrap_annotated(annotation)
    if not is_list(found):
        return None
    return f"<{'|'.join(choices_of(found)) or unwrap_annotated(get_args(found)[0]).__name__}>"


def choices_of(annotation: Any) -> list[str]:
    """The values of a ``Literal`` or of a list of them."""
    found = unwrap_annotated(annotation)
    if is_list(found):
        found = unwrap_annotated(get_args(found)[0])
    return [str(choice) for choice in get_args(found)] if get_origin(found) is Literal else []


def decoded(name: str, annotation: Any, value: Any) -> Any:
    """The value of a flag as the Struct wants it. Raises ``ConfigError`` for bad JSON."""
    if not holds_json(unwrap_annotated(annotation)):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {value!r}, which is not JSON: {error}") from error


def merged(*tables: Any) -> dict[str, dict[str, Any]]:
    """Tables of plugin options, later ones over earlier ones. Raises ``ConfigError`` for others."""
    result: dict[str, dict[str, Any]] = {}
    for table in tables:
        if not isinstance(table, Mapping) or not all(
            isinstance(v, Mapping) for v in table.values()
        ):
            raise ConfigError(
                f'plugin_options is {table!r}; write {{"kind:key": {{"option": value}}}}'
            )
        for name, values in table.items():
            result[name] = {**result.get(name, {}), **values}
    return result
