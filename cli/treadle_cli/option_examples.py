"""Options of a plugin as a TOML table, to copy into the file of ``--config``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treadle_cli.description import OptionRow

__all__ = ("toml_example",)


def toml_example(id: str, rows: Sequence[OptionRow]) -> str:
    """Return a table with the defaults of ``rows``; an option without a value is a comment."""
    lines = [f"[plugin_options.{_string(id)}]"]
    for row in rows:
        name = row.flag.rpartition(".")[2]
        value = None if row.default == "(required)" else msgspec.json.decode(row.default)
        if value is None:
            lines.append(
                f"# {name} = … ({row.type}{', required' if row.default[0] == '(' else ''})"
            )
        else:
            lines.append(f"{name} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a value as TOML writes it on one line."""
    if isinstance(value, dict):
        pairs = (f"{_string(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    return _string(value) if isinstance(value, str) else msgspec.json.encode(value).decode()


def _string(text: str) -> str:
    # A basic string of TOML has the escapes of JSON, but must escape this one, too.
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
