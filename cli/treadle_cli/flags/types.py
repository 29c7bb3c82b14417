"""From the type of an option to what a command line can hold, and back."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

import msgspec

from treadle.errors import ConfigError

__all__ = ("choices_of", "decode_value", "flag_type", "metavar")

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


def is_list(type_: Any) -> bool:
    origin: Any = get_origin(type_)
    return origin is list


def holds_json(annotation: Any) -> bool:
    """Whether the flag of this type is JSON text."""
    type_ = unwrap_annotated(annotation)
    if is_list(type_):
        return not is_simple(unwrap_annotated(get_args(type_)[0]))
    return not is_simple(type_)


def is_simple(type_: Any) -> bool:
    """Whether typer reads values of this type by itself."""
    return type_ in SIMPLE or get_origin(type_) is Literal


def flag_type(annotation: Any) -> Any:
    """Return the type for typer. ``None`` means that the flag was not set."""
    type_ = str if holds_json(annotation) else unwrap_annotated(annotation)
    if is_list(type_):
        item = unwrap_annotated(get_args(type_)[0])
        # Typer has no lists of choices; the Struct refuses other values.
        type_ = list[str] if get_origin(item) is Literal else list[item]  # type: ignore[valid-type]
    return Optional[type_]  # noqa: UP045  (a value, not an annotation)


def metavar(annotation: Any) -> str | None:
    """Return the placeholder of the value on a help page, ``None`` to use typer's own."""
    if holds_json(annotation):
        return "JSON"
    type_ = unwrap_annotated(annotation)
    if not is_list(type_):
        return None
    return f"<{'|'.join(choices_of(type_)) or unwrap_annotated(get_args(type_)[0]).__name__}>"


def choices_of(annotation: Any) -> list[str]:
    """The values of a ``Literal`` or of a list of them."""
    type_ = unwrap_annotated(annotation)
    if is_list(type_):
        type_ = unwrap_annotated(get_args(type_)[0])
    return [str(choice) for choice in get_args(type_)] if get_origin(type_) is Literal else []


def decode_value(name: str, annotation: Any, value: Any) -> Any:
    """Return the value of a flag in the form that the Struct takes. Raises ``ConfigError`` for bad JSON."""
    if not holds_json(unwrap_annotated(annotation)):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {value!r}, which is not JSON: {error}") from error


def merge_plugin_options(*tables: Any) -> dict[str, dict[str, Any]]:
    """Merge tables of plugin options, later over earlier. Raises ``ConfigError`` for other values."""
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
