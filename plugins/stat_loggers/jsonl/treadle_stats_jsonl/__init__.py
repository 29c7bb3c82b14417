"""The stat logger ``jsonl``: engine statistics as JSON lines in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from treadle.api import impl
from treadle.api.hookspecs import Options

if TYPE_CHECKING:
    from treadle.api.types import StatLogger

__all__ = ("TREADLE_OPTIONS", "treadle_stat_logger")


class JsonLinesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``stat_loggers:jsonl``."""

    path: Annotated[str, Meta(description="The file; lines are appended.")] = "treadle-stats.jsonl"
    seconds: Annotated[
        float, Meta(ge=0, description="Time between two lines; 0 writes one for every step.")
    ] = 10.0


TREADLE_OPTIONS = {"stat_loggers:jsonl": JsonLinesOptions}


@impl
def treadle_stat_logger(name: str, options: Options) -> StatLogger | None:
    if name != "jsonl":
        return None
    from treadle_stats_jsonl.logger import JsonLines

    return JsonLines(options["path"], options["seconds"])
