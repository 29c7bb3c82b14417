"""Starts of several ranks with empty kernel caches, also with a rank that is late: do they end, and when?

::

    python benchmarks/start_ranks.py benchmarks/shapes/qwen3-8b --ranks 2

Three starts, then one in which the last rank sleeps 20 s in a trial of kernels, one in which it does so
before a size is captured, and one whose process is killed while a kernel of the other ranks waits for the
last one. Each is a process of its own with random weights, an empty folder for compiled
kernels and its own time limit; it generates and prints one JSON line: the seconds of each stage, and the
first tokens, which must be the same in all. A start that hangs says at which stage and rank, with stacks,
and no process of any start may be left. The last line has the sum; the status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PLUGIN = '''
"""Lets the last rank be late where ``AT`` says: in a trial of kernels, or before a size is captured."""

import time

from treadle.api import impl
from treadle.api.types import CommunicatorOffer

TREADLE = {"communicators": ["late"]}


class Late:
    """The communicator of two or more GPUs, with agreements that the last rank is late for."""

    def __init__(self, inner, rank, size):
        self._inner, self._last = inner, rank == size - 1
        self.name, self.rank, self.world_size = "symmetric", rank, size
        self.all_gather = inner.all_gather
        self._dry_runs = 0
        self._is_dry_run = False

    @property
    def memory_bytes(self):
        return self._inner.memory_bytes

    def all_reduce(self, x):
        if AT < 0 and self._last and not self._is_dry_run:
            print(f"rank {self.rank} sleeps for ever", flush=True)
            time.sleep(3600)
        return self._inner.all_reduce(x)

    def all_reduce_min(self, values):
        return self._inner.all_reduce_min(values)

    def create_fused_op(self, op, size, dtype):
        if not hasattr(self._inner, "create_fused_op"):
            return None
        return self._inner.create_fused_op(op, size, dtype)

    def set_dry_run(self, enabled):
        self._is_dry_run = enabled
        self._dry_runs += enabled
        if enabled and self._last and self._dry_runs == AT:
            print(f"rank {self.rank} sleeps {SECONDS} s", flush=True)
            time.sleep(SECONDS)
        self._inner.set_dry_run(enabled)


def create(base, device):
    if device.type == "cpu":
        return Late(base, base.rank, base.world_size)
    from treadle_communicator_symmetric.communicator import create

    try:
        return Late(create(base, device), base.rank, base.world_size)
    except Exception as error:
        print(f"rank {base.rank} cannot be late: {error!r}", flush=True)
        raise


@impl
def treadle_communicator(request):
    return CommunicatorOffer("late", 100, create)
'''
# Of dry runs: the largest step, then three to eight trials for each of two operations, then 23 sizes.
DELAYS = {"trial": 3, "capture": 20, "killed": -1}

CHILD = """
import json, sys, time

if __name__ == "__main__":
    from treadle.api.requests import EngineRequest
    from treadle.api.sampling_params import SamplingParams
    from treadle.config import from_options
    from treadle.engine.core import EngineCore
    from treadle.plugins import PluginManager

    began = time.perf_counter()
    config = from_options(json.loads(sys.argv[1]))
    core = EngineCore(config, PluginManager(config.plugins))
    started = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for i in range(9):
        core.add_request(EngineRequest(f"r{i}", [5, 9, 200, 17 + i], params, float(i)))
    tokens = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            tokens.setdefault(output.id, []).extend(output.token_ids)
    generated = time.perf_counter()
    core.close()
    result = {
        "start": round(started - began, 1), "generate": round(generated - started, 1),
        "close": round(time.perf_counter() - generated, 1), "stages": core.info.stages,
        "report": core.info.report,
        "tokens": tokens["r0"],
    }
    print("RESULT " + json.dumps(result), flush=True)
"""


def run(arguments: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Run one start in ``folder``; return its result, or what went wrong."""
    options: dict[str, Any] = {
        "model": arguments.shape,
        "load_format": "dummy",
        "device": arguments.device,
        "max_model_len": 4096,
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": arguments.ranks,
        "startup_timeout": arguments.limit,
        **arguments.set,
    }
    if name in DELAYS:
        plugin = folder / "late.py"
        plugin.write_text(f"AT, SECONDS = {DELAYS[name]}, {arguments.delay}\n{PLUGIN}")
        options["plugin_file"] = [str(plugin)]
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }
    began = time.perf_counter()
    command = [sys.executable, "-c", CHILD, json.dumps(options)]
    result: dict[str, Any] = {"error": "it printed no result"}
    log = folder / "log"
    with log.open("w") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        workers: set[int] = set()
        deadline = time.monotonic() + arguments.most
        while child.poll() is None and time.monotonic() < deadline:
            workers |= children(child.pid)
            time.sleep(0.2)
            if name == "killed" and "sleeps for ever" in log.read_text(errors="replace"):
                time.sleep(3)  # until the kernels of the other ranks wait
                result = {"killed_with_workers": len(workers)}
                break
        else:
            if child.returncode is None:
                result = {"error": f"it has not ended in {arguments.most} s: killed"}
        child.kill()
        child.wait()
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        if line.startswith("RESULT ") and name != "killed":
            result = json.loads(line.removeprefix("RESULT "))
    if "error" in result:
        print("\n".join(lines[-arguments.lines :]), flush=True)
    result["left"] = left(workers)
    return {"run": name, "seconds": round(time.perf_counter() - began, 1), **result}


def children(pid: int) -> set[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return {int(c) for task in tasks for c in (task / "children").read_text().split()}
    except OSError:
        return set()


def left(pids: set[int], seconds: float = 15.0) -> list[int]:
    """Return those that still run after ``seconds``, and kill them."""
    deadline = time.monotonic() + seconds
    while (running := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return running


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help="a model folder; its config.json is enough")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", nargs="+", default=["empty", "empty", "empty", *DELAYS])
    parser.add_argument("--delay", type=float, default=20.0, help="seconds that a rank is late")
    parser.add_argument("--limit", type=float, default=60.0, help="startup_timeout")
    parser.add_argument("--most", type=float, default=120.0, help="seconds of one run")
    parser.add_argument("--lines", type=int, default=120, help="of the output of a run that fails")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", type=json.loads, default={}, help="further options, as JSON")
    arguments = parser.parse_args()
    results = []
    for name in arguments.runs:
        with tempfile.TemporaryDirectory(prefix="treadle-start-") as folder:
            results.append(run(arguments, name, Path(folder)))
        print(json.dumps(results[-1]), flush=True)
    failed = [r["run"] for r in results if "error" in r or r["left"]]
    same = len({str(r["tokens"]) for r in results if "tokens" in r}) <= 1
    print(json.dumps({"runs": len(results), "failed": failed, "same_tokens": same}))
    return int(bool(failed) or not same)


if __name__ == "__main__":
    sys.exit(main())
