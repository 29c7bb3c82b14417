"""Every command and flag of the command line, for docs/ref/cli.md, from the applications themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
from repository import members

from treadle.api.sampling_params import SamplingParams
from treadle.config import EngineConfig, config_sections
from treadle_cli.lazy import HELP
from treadle_cli.main import app
from treadle_server.config import ServerConfig

__all__ = ("reference",)

SHARED_FLAGS: dict[str, set[str]] = {
    "[options of the engine](options.md)": {
        field for _, part in config_sections(EngineConfig) for field in part.__struct_fields__
    },
    "[options of the server](options.md#server)": set(ServerConfig.__struct_fields__),
    "[sampling parameters](sampling.md)": set(SamplingParams.__struct_fields__),
}
"""Where the flags are described that many commands share, and their names."""


def reference() -> str:
    """One section for each command that treadle ships, with the flags that only it has."""
    root: Any = typer.main.get_command(app)
    context = root.context_class(root, info_name="treadle")
    command_names = {
        entry.key for m in members() for entry in m.entry_points if entry.kind == "commands"
    }
    names = [*(n for n in HELP if n in command_names), *sorted(command_names - set(HELP))]
    sections: list[str] = []
    for name in names:
        _, command, _ = root.resolve_command(context, [name])
        sections += _sections(f"treadle {name}", command, context)
    return "\n".join(sections)


def _sections(name: str, command: Any, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=None)
    if hasattr(command, "list_commands"):
        for subcommand in command.list_commands(context):
            yield from _sections(
                f"{name} {subcommand}", command.get_command(context, subcommand), context
            )
        return
    usage = " ".join(command.collect_usage_pieces(context))
    text = inspect.cleandoc(command.help or "").replace("``", "`")
    yield f"### {name}\n\n```text\n{name} {usage}\n```\n\n{text}\n"
    rows, shared = [], []
    for param in command.get_params(context):
        record = param.get_help_record(context)
        category = next((h for h, options in SHARED_FLAGS.items() if param.name in options), None)
        if record is None or param.name == "help":
            continue
        if category is not None and param.param_type_name == "option":
            shared.append(category)
        else:
            rows.append((f"`{record[0].strip()}`", record[1]))
    if rows:
        lines = (f"| {flag} | {help_text} |" for flag, help_text in map(_cells, rows))
        yield "| | |\n| --- | --- |\n" + "\n".join(lines) + "\n"
    if shared:
        yield f"Also the {', the '.join(dict.fromkeys(shared))}.\n"


def _cells(row: tuple[str, str]) -> tuple[str, str]:
    flag, help_text = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
    return flag, help_text
