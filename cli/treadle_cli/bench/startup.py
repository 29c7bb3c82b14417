"""From the start of a process to the first token, with each stage between them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from treadle.api.step_types import EngineInfo
from treadle.errors import EngineError
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.engine import engine_options, run_info
from treadle_cli.bench.results import Startup, select_iteration
from treadle_cli.flags import Options

__all__ = ("first_token", "startup")

PROMPT = list(range(1, 9))
CHILD = "from treadle_cli.bench.startup import first_token; first_token()"


class StartupTimes(msgspec.Struct, frozen=True):
    """What the measured process reports; times are those of the system's monotonic clock."""

    imported: float
    ready: float
    token: float
    info: EngineInfo


def startup(options: Options, bench: BenchConfig) -> Iterator[Startup]:
    """Start an engine in a new process, ``num_iters_warmup`` times untimed, ``num_iters`` timed."""
    engine_args = engine_options(options, bench)
    for _ in range(bench.num_iters_warmup):
        run_start(engine_args)
    starts = [run_start(engine_args) for _ in range(bench.num_iters)]
    totals = [times.token - start_time for start_time, times in starts]
    start_time, times = starts[select_iteration(totals, bench.pick)]
    ready = times.ready - start_time
    yield Startup(
        first_token_seconds=round(times.token - start_time, 3),
        ready_seconds=round(ready, 3),
        stages={"python and imports": round(times.imported - start_time, 3), **times.info.stages},
        pick=bench.pick,
        iter_seconds=[round(total, 3) for total in totals],
        run_info=run_info(times.info, engine_args, bench, ready),
    )


def run_start(engine_args: dict[str, Any]) -> tuple[float, StartupTimes]:
    """Return the start time of a new process and its times. Raises ``EngineError`` if it failed."""
    start_time = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(engine_args),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise EngineError(f"the engine did not start (exit status {process.returncode}): {last}")
    return start_time, msgspec.json.decode(process.stdout.splitlines()[-1], type=StartupTimes)


def first_token() -> None:
    """Run in the measured process: read options as JSON from stdin, write times as JSON to stdout."""
    engine_args = json.loads(sys.stdin.read())
    from treadle import LLM, SamplingParams

    imported = time.monotonic()
    with LLM(**engine_args) as llm:
        ready = time.monotonic()
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([PROMPT], params, use_tqdm=False)
        times = StartupTimes(imported, ready, time.monotonic(), llm.info)
    print(msgspec.json.encode(times).decode(), flush=True)
