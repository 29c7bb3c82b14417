"""``treadle bench``: one JSON line for each workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import typer

from treadle.api import impl
from treadle_cli.flags import BENCH, ENGINE, Options, with_flags
from treadle_cli.help import SectionedCommand, application

if TYPE_CHECKING:
    from treadle_cli.bench.results import Result, Startup
    from treadle_cli.bench.scheduler import SchedulerCost

__all__ = ("treadle_command",)


@with_flags(*ENGINE, BENCH)
def throughput(*, options: Options) -> None:
    """Measure tokens per second with all requests at once.

    mixed, bs1, prefill, dec32 and dec256 are the workloads of docs/how/benchmarks.md; custom takes its
    sizes from flags. The prefix cache is off unless --enable-prefix-caching is given.
    """
    bench = options.struct(BENCH)
    from treadle_cli.bench.throughput import throughput as measure

    for result in measure(options, bench):
        _print(result)


@with_flags(*ENGINE, BENCH)
def latency(*, options: Options) -> None:
    """Measure the time to the first token, between tokens and to the end.

    --max-concurrency bounds the requests at a time, --request-rate spreads their arrivals. The prefix
    cache is off unless --enable-prefix-caching is given.
    """
    bench = options.struct(BENCH)
    from treadle_cli.bench.latency import latency as measure

    for result in measure(options, bench):
        _print(result)


@with_flags(*ENGINE, BENCH)
def startup(*, options: Options) -> None:
    """Measure the time from the start of a process to the first token.

    Each start is a new process; --num-iters-warmup starts are not timed, so that files are in memory and
    kernels compiled. Of the other flags of this group --num-iters, --pick and --hf-config matter.
    """
    bench = options.struct(BENCH)
    from treadle_cli.bench.startup import startup as measure

    for result in measure(options, bench):
        _print(result)


def scheduler() -> None:
    """Measure what a decode step costs on the CPU side, around a runner that computes nothing.

    One line for each of 1, 32, 256 and 1,024 running sequences. Needs no model and no device.
    """
    from treadle_cli.bench.scheduler import measure_step_cost

    for cost in measure_step_cost():
        _print(cost)


def _print(result: Result | Startup | SchedulerCost) -> None:
    print(msgspec.json.encode(result).decode(), flush=True)


@impl
def treadle_command(name: str) -> typer.Typer | None:
    if name != "bench":
        return None
    app = application("Measure throughput, latency, start-up and the CPU side of a step.")
    app.command("throughput", cls=SectionedCommand)(throughput)
    app.command("latency", cls=SectionedCommand)(latency)
    app.command("startup", cls=SectionedCommand)(startup)
    app.command("scheduler", cls=SectionedCommand)(scheduler)
    return app
