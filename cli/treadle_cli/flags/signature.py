"""A decorator that gives a command the flags of some groups.

Typer reads a function's signature, so the flags are written into one. A flag that is not given
is ``None`` and leaves the option to the file, then to the Struct's default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from treadle_cli.completion import completer_of
from treadle_cli.flags.file import read_file
from treadle_cli.flags.groups import Field, Group
from treadle_cli.flags.options import Options, plugin_options
from treadle_cli.flags.types import (
    decode_value,
    flag_type,
    merge_plugin_options,
    metavar,
    unwrap_annotated,
)
from treadle_cli.rewrite import FLAG, PREFIX

__all__ = ("with_flags",)

ARGUMENT = "model"
PLUGIN_OPTIONS = "plugin_options"


def with_flags(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the flags of ``groups`` and ``--config``; the function gets them as ``options``."""
    fields = {f.name: f for group in groups for f in group.fields()}
    extra = [CONFIG, *(p for g in groups for p in _parameters(g))]
    if PLUGIN_OPTIONS in fields:
        extra.append(PLUGIN_OPTION)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        own_parameters = [
            p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(function).parameters.values()
            if p.name != "options"
        ]
        names = [p.name for p in own_parameters]

        def command(**values: Any) -> None:
            arguments = {name: values.pop(name) for name in names}
            function(**arguments, options=_options(fields, values))

        parameters = _ordered([*own_parameters, *extra])
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _ordered(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """The model first: it is the first argument on the line."""
    return sorted(parameters, key=lambda p: p.name != ARGUMENT)


def _parameters(group: Group) -> Iterator[inspect.Parameter]:
    for field in group.fields():
        if field.name == ARGUMENT:
            info = typer.Argument(
                metavar="MODEL",
                help=_help(field),
                show_default=False,
                autocompletion=completer_of(ARGUMENT),
            )
            yield _parameter(ARGUMENT, str | None, info)
        else:
            yield _parameter(field.name, flag_type(field.annotation), _option(field, group.panel))


def _option(field: Field, panel: str) -> Any:
    flag = "--" + field.name.replace("_", "-")
    if unwrap_annotated(field.annotation) is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    return typer.Option(
        flag,
        help=_help(field),
        rich_help_panel=panel,
        show_default=False,
        metavar=metavar(field.annotation),
        autocompletion=completer_of(field.name),
    )


def _help(field: Field) -> str:
    """Return the description with the default, unless that is empty or the text names one itself."""
    default = field.default
    if default is None or default in ([], {}, "") or "(default" in field.description:
        return field.description
    if isinstance(default, bool):
        text = "on" if default else "off"
    else:
        text = ", ".join(default) if isinstance(default, list) else str(default)
    return f"{field.description} (default: {text})"


def _parameter(name: str, annotation: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, info],
    )


CONFIG = _parameter(
    "config",
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Options in TOML (by section or flat) or YAML; flags win."
    ),
)
PLUGIN_OPTION = _parameter(
    "plugin_option",
    list[str] | None,
    typer.Option(
        FLAG,
        metavar="NAME=VALUE",
        help=f"KIND.KEY.OPTION=VALUE of one plugin; also {PREFIX}KIND.KEY.OPTION=VALUE.",
        rich_help_panel="Plugins",
    ),
)


def _options(fields: Mapping[str, Field], flags: dict[str, Any]) -> Options:
    pairs = plugin_options(flags.pop("plugin_option", None) or [])
    values = read_file(flags.pop("config"), fields)
    tables = [values.pop(PLUGIN_OPTIONS, {})]
    for name, value in flags.items():
        if value is not None and value != []:
            values[name] = decode_value(name, fields[name].annotation, value)
    tables += [values.pop(PLUGIN_OPTIONS, {}), pairs]
    if any(tables):
        values[PLUGIN_OPTIONS] = merge_plugin_options(*tables)
    return Options(values)
