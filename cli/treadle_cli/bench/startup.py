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
from treadle_cli.bench.engine import about, engine_options
from treadle_cli.bench.results import Startup, select_pass
from treadle_cli.flags import Options

__all__ = ("first_token", "startup")

PROMPT = list(range(1, 9))
CHILD = "from treadle_cli.bench.startup import first_token; first_token()"


class StartupTimes(msgspec.Struct, frozen=True):
    """What the process that is measured says; times are of the system's monotonic clock."""

    imported: float
    ready: float
    token: float
    info: EngineInfo


def startup(options: Options, bench: BenchConfig) -> Iterator[Startup]:
    """Start an engine in a process of its own, ``warmup`` times untimed and ``passes`` timed."""
    given = engine_options(options, bench)
    for _ in range(bench.num_iters_warmup):
        one_start(given)
    starts = [one_start(given) for _ in range(bench.num_iters)]
    totals = [moments.token - began for began, moments in starts]
    began, moments = starts[select_pass(totals, bench.pick)]
    ready = moments.ready - began
    yield Startup(
        first_token_seconds=round(moments.token - began, 3),
        ready_seconds=round(ready, 3),
        stages={"python and imports": round(moments.imported - began, 3), **moments.info.stages},
        pick=bench.pick,
        passes=[round(total, 3) for total in totals],
        about=about(moments.info, given, bench, ready),
    )


def one_start(given: dict[str, Any]) -> tuple[float, StartupTimes]:
    """When the process was started, and what it said. Raises ``EngineError`` if it failed."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineError(f"the engine did not start (exit status {done.returncode}): {last}")
    return began, msgspec.json.decode(done.stdout.splitlines()[-1], type=StartupTimes)


def first_token() -> None:
    """The process that is measured: options as JSON on stdin, moments as JSON on stdout."""
    given = json.loads(sys.stdin.read())
    from treadle import LLM, SamplingParams

    imported = time.monotonic()
    with LLM(**given) as llm:
        ready = time.monotonic()
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([PROMPT], params, use_tqdm=False)
        moments = StartupTimes(imported, ready, time.monotonic(), llm.info)
    print(msgspec.json.encode(moments).decode(), flush=True)
