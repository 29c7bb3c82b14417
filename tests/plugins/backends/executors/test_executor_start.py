"""A start of several workers ends: with all ranks, with an error that names rank and stage, or with its parent.

Most ranks here are scripts that go through the stages of a start without torch, behind the worker's real
``main``; a few are real. The whole matrix is ``pytest -m slow``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from treadle_executor_mp.executor import MultiprocExecutor

from treadle.config import EngineConfig, from_options
from treadle.engine.core import EngineCore
from treadle.errors import EngineDeadError, EngineError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle_worker_kit.monitor import StartMonitor

STAGES = ("imports", "plugins", "communicator", "weights", "kernels", "graphs: 8 rows")
FEW = ("imports", "weights", "graphs: 8 rows")
AT = [stage if stage in FEW else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES]

# A rank that plays a start. It says its process id, and meets the others by files.
RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
from treadle.api.step_types import EngineInfo
from treadle_executor_mp import worker
from treadle_worker_kit.messages import Progress, Started, Stop, decode_command, encode

INFO = EngineInfo(
    model="m", architecture="A", dtype="float32", device="cpu", vocab_size=8, max_model_len=8,
    page_size=4, kv_cache_groups=[], num_async_steps=0, eos_token_ids=[],
)


def odd_rank(fault):
    match fault:
        case "delay":
            time.sleep(0.2)
        case "hang":
            time.sleep(600)
        case "locked":  # as in a launch that waits for room in the queue of a device
            ctypes.PyDLL(None).sleep(600)
        case "raise":
            raise ValueError("odd")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)


def serve(pipe):
    start = decode_command(pipe.recv_bytes())
    odd = start.config.model.hf_overrides
    for number, stage in enumerate(odd["stages"]):
        pipe.send_bytes(encode(Progress(stage)))
        if number == 0:
            os.write(1, b"pid %d\\n" % os.getpid())
        if start.rank == 1 and odd["at"] in (stage, "all"):
            odd_rank(odd["fault"])
        pipe.send_bytes(encode(Progress(stage, True)))
        Path(f"{start.rendezvous}-{number}-{start.rank}").touch()
        for rank in range(start.world_size):
            while not Path(f"{start.rendezvous}-{number}-{rank}").exists():
                time.sleep(0.01)
        pipe.send_bytes(encode(Progress(stage)))
    pipe.send_bytes(encode(Started(INFO)))
    while not isinstance(decode_command(pipe.recv_bytes()), Stop):
        pass


def main(fd):
    worker._serve = serve
    sys.stderr = open(Path(__file__).with_name(f"stacks-{os.getpid()}"), "w")
    worker.main(fd)
"""

PARENT = """
import json, sys, time
from treadle.config import from_options
from treadle.plugins import PluginManager
from treadle_executor_mp.executor import MultiprocExecutor

config = from_options(**json.loads(sys.argv[1]))
MultiprocExecutor(config, PluginManager(config.plugins), "start_rank:main").start()
"""


class Clock:
    """Stands still until rank 1 is the one that is waited for, at a stage; then hours pass."""

    def __init__(self, at: str) -> None:
        self.monitor: StartMonitor | None = None
        self._at, self._now = at, 0.0

    def __call__(self) -> float:
        if self.monitor is not None and self.monitor.behind == [1]:
            self._now += 3600.0 * (self.monitor.stage_of(1) == self._at)
        return self._now


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "start_rank.py").write_text(RANK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def options(fault: str, at: str, ranks: int = 2) -> dict[str, Any]:
    odd = {"fault": fault, "at": at, "stages": STAGES}
    return {"model": "m", "device": "cpu", "tensor_parallel_size": ranks, "hf_overrides": odd}


class Starting:
    """An executor of ranks that are scripts, and its processes, of which none may be left."""

    def __init__(self, fault: str, at: str, ranks: int = 2) -> None:
        config = from_options(**options(fault, at, ranks))
        self.executor = MultiprocExecutor(config, PluginManager(config.plugins), "start_rank:main")

    def watch_closely(self, at: str) -> None:
        """Let the time limit pass when rank 1 is waited for at a stage."""
        clock = Clock(at)
        executor = self.executor
        clock.monitor = executor.monitor = StartMonitor(executor.world_size, 1800.0, clock)

    def stop(self) -> None:
        workers = list(self.executor._workers)
        self.executor.shutdown()
        assert workers and all(worker.returncode is not None for worker in workers)
        assert not any(t.name.startswith("treadle-workers") for t in threading.enumerate())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.usefixtures("path")
def test_a_rank_that_is_late_everywhere_is_waited_for(ranks: int) -> None:
    starting = Starting("delay", "all", ranks)
    try:
        assert starting.executor.start().model == "m"
        assert starting.executor.serving
    finally:
        starting.stop()


@pytest.mark.own_python
@pytest.mark.parametrize("at", AT)
def test_a_rank_that_hangs_is_named_with_its_stage(path: Path, at: str) -> None:
    """And where it hangs is written, by a signal."""
    starting = Starting("hang", at)
    starting.watch_closely(at)
    try:
        words = rf"the start hangs: rank 1 did not finish stage '{at}' in 1800 s; the others wait"
        with pytest.raises(EngineError, match=words):
            starting.executor.start()
        waiting, hanging = starting.executor._workers
        stacks = path / f"stacks-{hanging.pid}"
        while "in main" not in stacks.read_text():
            assert hanging.poll() is None
            time.sleep(0.02)
        assert "in serve" in stacks.read_text()
        assert not (path / f"stacks-{waiting.pid}").read_text()
    finally:
        starting.stop()


@pytest.mark.parametrize("at", AT)
@pytest.mark.usefixtures("path")
def test_a_rank_that_raises_is_named_with_its_stage(at: str) -> None:
    starting = Starting("raise", at)
    try:
        words = rf"^rank 1 failed in stage '{at}' of the start: ValueError: odd$"
        with pytest.raises(EngineDeadError, match=words):
            starting.executor.start()
    finally:
        starting.stop()


@pytest.mark.parametrize("at", AT)
@pytest.mark.usefixtures("path")
def test_a_rank_that_dies_is_named_with_its_stage(at: str) -> None:
    starting = Starting("die", at)
    try:
        words = rf"the worker of rank 1 is gone in stage '{at}' of the start \(exit code -9\)"
        with pytest.raises(EngineDeadError, match=words):
            starting.executor.start()
    finally:
        starting.stop()


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def killed(parent: subprocess.Popen[str], *until: str) -> list[int]:
    """Kill ``parent`` after lines that begin so; return the process ids in its output."""
    lines: list[str] = []
    assert parent.stdout is not None
    try:
        while any(sum(line.startswith(u) for line in lines) < until.count(u) for u in until):
            lines.append(parent.stdout.readline())
            assert lines[-1], f"it has ended after {lines}"
    finally:
        parent.kill()
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")]


@pytest.mark.own_python
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("fault", ["hang", "locked"])
@pytest.mark.parametrize("at", AT)
def test_workers_end_when_their_parent_is_killed(path: Path, at: str, fault: str) -> None:
    command = [sys.executable, "-c", PARENT, json.dumps(options(fault, at))]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pids = killed(parent, "pid", "pid")
    assert gone(pids)


# ----------------------------------------------------------------------------- real workers

# Rank 1 is late in every stage. ``FAULT`` is what it does at the hook ``AT``, or in a sum of the first step.
PLUGIN = """
import json
import os
import time

from treadle.api import impl
from treadle.api.types import CommunicatorOffer

TREADLE = {"communicators": ["late"], "extensions": ["late"]}
ranks = []


def late(hook):
    if ranks and ranks[0].rank == 1:
        time.sleep(0.1)
        if hook == AT:
            FAULTS[FAULT]()


FAULTS = {
    "hang": lambda: time.sleep(600),
    "die": lambda: os.kill(os.getpid(), 9),
}


class Late:
    memory_bytes = 0

    def __init__(self, base):
        ranks.append(self)
        self.base, self.rank, self.world_size = base, base.rank, base.world_size
        self.all_gather, self.set_dry_run = base.all_gather, base.set_dry_run

    def all_reduce(self, x):
        os.write(1, b"sum\\n")
        late("sum")
        return self.base.all_reduce(x)

    def all_reduce_min(self, values):
        late("agreement")
        return self.base.all_reduce_min(values)


def create(base, device):
    os.write(1, b"pid %d\\n" % os.getpid())
    return Late(base)


@impl
def treadle_communicator(request):
    return CommunicatorOffer("late", 99, create)


@impl(wrapper=True)
def treadle_model_source(scheme):
    late("source")
    return (yield)


@impl(wrapper=True)
def treadle_model(architecture):
    late("model")
    return (yield)


@impl(wrapper=True)
def treadle_kernel_op(op):
    late("kernel")
    return (yield)
"""
HOOKS = {"source": "download", "model": "weights"}
SERVE = """
import sys, time
from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager

if __name__ == "__main__":
    config = from_options(
        model=sys.argv[1], plugin_file=[sys.argv[2]], device="cpu", dtype="float32", cpu_threads=1,
        num_pages=64, distributed_executor_backend="mp", tensor_parallel_size=2,
    )
    core = EngineCore(config, PluginManager(config.plugins))
    print("started", *core.info.stages, sep="|", flush=True)
    core.add_request(EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=9), 0.0))
    while core.has_work:
        core.step()
"""


def plugin(folder: Path, at: str, fault: str) -> str:
    file = folder / "late.py"
    file.write_text(f"AT, FAULT = {at!r}, {fault!r}\n{PLUGIN}")
    return str(file)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_late_ranks_start_and_end_in_a_sum_with_their_parent(tmp_path: Path) -> None:
    """Rank 1 hangs in the first sum, for which rank 0 waits in gloo."""
    model = make_checkpoint(tmp_path / "model")
    command = [sys.executable, "-c", SERVE, str(model), plugin(tmp_path, "sum", "hang")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        stages = "started|download|configuration|weights|cache|kernels|sampler"
        pids = killed(parent, "pid", "pid", stages, "sum", "sum")
    assert gone(pids)


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        ("source", "hang"),
        pytest.param("source", "die", marks=pytest.mark.slow),
        pytest.param("model", "hang", marks=pytest.mark.slow),
        pytest.param("model", "die", marks=pytest.mark.slow),
    ],
)
def test_a_real_worker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, fault: str
) -> None:
    clock = Clock(HOOKS[at])

    def monitor(world_size: int, limit: float) -> StartMonitor:
        clock.monitor = StartMonitor(world_size, limit, clock)
        return clock.monitor

    if fault == "hang":
        monkeypatch.setattr("treadle_worker_kit.group.StartMonitor", monitor)
    config: EngineConfig = from_options(
        model=str(make_checkpoint(tmp_path / "model")),
        plugin_file=[plugin(tmp_path, at, fault)],
        device="cpu",
        cpu_threads=1,
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        startup_timeout=1800,
    )
    did = {"hang": "did not finish", "die": "is gone in"}[fault]
    with pytest.raises(EngineError, match=rf"rank 1 {did} stage '{HOOKS[at]}'"):
        EngineCore(config, PluginManager(config.plugins))
