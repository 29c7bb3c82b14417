"""``treadle bench``: one JSON line for each workload, and the load of a server."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from treadle.api import impl
from treadle.errors import ConfigError
from treadle_cli.flags import BENCH, BENCH_SERVE, ENGINE, Options, with_flags
from treadle_cli.flags.server import ApiKey, first_key
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


OBJECTIVE = re.compile(r"[a-z0-9]+:[0-9.]+")


@with_flags(BENCH_SERVE)
def serve(
    *,
    objectives: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    api_key: ApiKey = None,
    options: Options,
) -> None:
    """Load a server, of treadle or any other with OpenAI's API, and measure what its clients wait for.

    Reports p50, p90 and p99 of the time to the first token (TTFT), per output token (TPOT), between
    tokens (ITL) and to the end (E2EL). Prints a table on a terminal, one JSON line to a pipe.
    """
    config = options.struct(BENCH_SERVE)
    # ``--goodput ttft:200 tpot:50``: what follows the first objective looks like arguments.
    words = [w for w in (config.model, *(objectives or ())) if w is not None]
    names = [word for word in words if not OBJECTIVE.fullmatch(word)]
    more = [word for word in words if OBJECTIVE.fullmatch(word)] if config.goodput else []
    if len(names) + len(more) < len(words) or len(names) > 1:
        raise ConfigError(f"there is one MODEL, not {' '.join(words)!r}")
    config = msgspec.structs.replace(
        config, model=names[0] if names else None, goodput=[*config.goodput, *more]
    )
    from treadle_cli.bench.serve.plot import check_plot, draw
    from treadle_cli.bench.serve.report import report, warnings_of
    from treadle_cli.bench.serve.run import bench_serve, write_result
    from treadle_cli.terminal import Screen, Spinner

    if config.plot is not None:
        check_plot(Path(config.plot))
    screen, state = Screen(), ["starting"]
    spinner = Spinner(Screen(sys.stderr))
    spinner.start(lambda: state[0])
    try:
        result, records = bench_serve(
            config, first_key(api_key), lambda text: state.__setitem__(0, text)
        )
    finally:
        spinner.stop()
    if screen.interactive:
        screen.line(report(result))
    else:
        print(msgspec.json.encode(result).decode(), flush=True)
    for warning in warnings_of(result):
        screen.note(warning)
    if config.result_filename is not None:
        write_result(Path(config.result_filename), result, records)
    if config.plot is not None:
        draw(Path(config.plot), result, records)


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
    app = application("Measure throughput, latency, a server, start-up and the CPU side of a step.")
    app.command("throughput", cls=SectionedCommand)(throughput)
    app.command("latency", cls=SectionedCommand)(latency)
    app.command("serve", cls=SectionedCommand)(serve)
    app.command("startup", cls=SectionedCommand)(startup)
    app.command("scheduler", cls=SectionedCommand)(scheduler)
    return app
