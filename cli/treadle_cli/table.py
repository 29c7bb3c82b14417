"""Tables and times for people."""

from __future__ import annotations

from collections.abc import Sequence

from treadle_cli.terminal.wrapping import text_width

__all__ = ("age", "table")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with columns of equal width."""
    lines = [head, *rows]
    widths = [max(text_width(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell + " " * (width - text_width(cell))
            for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def age(seconds: float) -> str:
    """``"3 d"``, ``"2 h"``, ``"5 min"`` or ``"40 s"``: one unit is enough."""
    for limit, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
