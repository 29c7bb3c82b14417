"""``weft bench``: one JSON line for each workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import typer

from weft.api import impl
from weft_cli.flags import BENCH, ENGINE, Options, with_flags
from weft_cli.help import SectionedCommand, application

if TYPE_CHECKING:
    from weft_cli.bench.results import Result

__all__ = ("weft_command",)


@with_flags(*ENGINE, BENCH)
def throughput(*, options: Options) -> None:
    """Measure tokens per second with all requests at once.

    mixed, bs1, prefill, dec32 and dec256 are the workloads of docs/benchmarks.md; custom takes its
    sizes from flags. The prefix cache is off unless --enable-prefix-caching is given.
    """
    bench = options.struct(BENCH)
    from weft_cli.bench.throughput import throughput as measure

    for result in measure(options, bench):
        _print(result)


@with_flags(*ENGINE, BENCH)
def latency(*, options: Options) -> None:
    """Measure the time to the first token, between tokens and to the end.

    --concurrency bounds the requests at a time, --request-rate spreads their arrivals. The prefix
    cache is off unless --enable-prefix-caching is given.
    """
    bench = options.struct(BENCH)
    from weft_cli.bench.latency import latency as measure

    for result in measure(options, bench):
        _print(result)


def _print(result: Result) -> None:
    print(msgspec.json.encode(result).decode(), flush=True)


@impl
def weft_command(name: str) -> typer.Typer | None:
    app = application("Measure throughput and latency.")
    app.command("throughput", cls=SectionedCommand)(throughput)
    app.command("latency", cls=SectionedCommand)(latency)
    return app
