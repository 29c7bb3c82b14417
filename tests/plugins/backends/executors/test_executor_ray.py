"""Two actors of a local Ray: same logits as one process, and honest deaths."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.errors import ConfigError, EngineDeadError, EngineError, TreadleError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.early

ray = pytest.importorskip("ray")

PROMPTS = [[5, 9, 200, 17], list(range(30, 70)), [1]]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def make(folder: Path, ray_options: dict[str, Any] | None = None, **options: Any) -> EngineCore:
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
        "num_pages": 64,
    }
    if ray_options is not None:
        values["plugin_options"] = {"executors:ray": ray_options}
    config = from_options(model=str(folder), **{**values, **options})
    return EngineCore(config, PluginManager(config.plugins))


def pair(folder: Path, **ray_options: Any) -> EngineCore:
    return make(folder, ray_options, distributed_executor_backend="ray", tensor_parallel_size=2)


def run(core: EngineCore) -> dict[str, list[tuple[int, list[float]]]]:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=5)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(EngineRequest(f"r{i}", prompt, params, time.monotonic()))
    entries: dict[str, list[tuple[int, list[float]]]] = {f"r{i}": [] for i in range(len(PROMPTS))}
    while core.has_work:
        for output in core.step():
            for line in output.logprobs or []:
                entries[output.id].append((line.ids[0], line.logprobs))
    return entries


def descendants(pid: int) -> set[int]:
    """Every process below ``pid``. Ray's own stay below the one that started it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids, new = set(), {pid}
    while new:
        pids |= new
        new = {child for child, parent in parents.items() if parent in new} - pids
    return pids - {pid}


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(pids: set[int], wait: float = 10.0) -> bool:
    deadline = time.monotonic() + wait
    while any(map(running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def workers() -> dict[int, int]:
    """Process ids of the actors by the order in which they were made."""
    ids = [pid for pid in descendants(os.getpid()) if running(pid)]
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in ids}
    return dict(enumerate(sorted(pid for pid, line in lines.items() if "ray::Worker" in line)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One key/value head for two ranks: they hold copies of it.
    return make_checkpoint(tmp_path_factory.mktemp("tp"), "Qwen3ForCausalLM", num_key_value_heads=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[set[int]]:
    """A Ray that is there before the engines and after them, as a cluster is; its processes."""
    before = descendants(os.getpid())
    ray.init(
        address="local",
        num_cpus=3,
        num_gpus=0,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield descendants(os.getpid()) - before
    ray.shutdown()


@pytest.fixture(scope="class")
def core(folder: Path, cluster: set[int]) -> Iterator[EngineCore]:
    """An engine of two actors, which takes seconds to start. The test that kills one closes it."""
    core = pair(folder)
    yield core
    core.close()


@pytest.mark.usefixtures("cluster")
class TestInACluster:
    def test_two_ranks_equal_one(self, folder: Path, core: EngineCore) -> None:
        reference = make(folder)
        expected, actual = run(reference), run(core)
        core.check_health()
        reference.close()
        for name, lines in expected.items():
            assert [token for token, _ in actual[name]] == [token for token, _ in lines]
            for (_, logprobs), (_, expected_logprobs) in zip(actual[name], lines, strict=True):
                assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)

    def test_a_killed_actor_ends_the_engine_with_the_reason(self, core: EngineCore) -> None:
        core.add_request(EngineRequest("k", [1, 2, 3], LONG, time.monotonic()))
        core.step()
        core.check_health()
        processes = set(workers().values())
        victim = ray.get(core._executor._actors[1].pid.remote())  # type: ignore[attr-defined]
        os.kill(victim, signal.SIGKILL)
        start_time = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 is gone: .*process has died"):
            for _ in range(200):
                core.step()
        with pytest.raises(EngineDeadError, match="rank 1 is gone"):
            core.check_health()
        assert time.monotonic() - start_time < 30
        core.close()
        assert len(processes) == 2 and gone(processes), "actors are left in the cluster"
        assert ray.is_initialized(), "the engine has stopped a Ray that it did not start"

    @pytest.mark.slow
    def test_an_idle_engine_notices_too(self, folder: Path) -> None:
        core = pair(folder)
        os.kill(workers()[0], signal.SIGKILL)
        start_time = time.monotonic()
        with pytest.raises(EngineDeadError, match="is gone"):
            while time.monotonic() - start_time < 5:
                core.check_health()
                time.sleep(0.05)
        core.close()

    @pytest.mark.slow
    def test_errors_at_start_are_the_workers_own(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="ranks"):
            make(folder, {}, distributed_executor_backend="ray", tensor_parallel_size=3)
        assert gone(set(workers().values()))

    @pytest.mark.parametrize(
        ("options", "ray_options", "error", "message"),
        [
            ({"device": "cuda:1"}, {}, ConfigError, "Ray chooses the devices"),
            ({"device": "cuda"}, {}, ConfigError, "the Ray cluster has 0 GPUs"),
            ({}, {"address": "ray://127.0.0.1:10001"}, ConfigError, "a Ray client"),
            ({}, {"placement": "NEAR"}, ConfigError, "placement"),
            (
                {},
                {"cpus_per_worker": 2, "placement_timeout": 1},
                EngineError,
                r"no room for 2 workers of \{'CPU': 2.0\} \(PACK\).*free are \{'CPU': 3.0",
            ),
        ],
    )
    def test_what_cannot_work(
        self,
        folder: Path,
        options: dict[str, Any],
        ray_options: dict[str, Any],
        error: type[TreadleError],
        message: str,
    ) -> None:
        with pytest.raises(error, match=message):
            make(
                folder,
                ray_options,
                distributed_executor_backend="ray",
                tensor_parallel_size=2,
                **options,
            )


class TestOfItsOwn:
    """Without a Ray in the process: the engine starts one and takes it down."""

    @pytest.fixture(autouse=True)
    def shut_down_ray(self) -> None:
        ray.shutdown()

    def test_no_cluster_at_an_address(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"'127.0.0.1:9'; no Ray cluster answers"):
            pair(folder, address="127.0.0.1:9")
        assert not ray.is_initialized()

    def test_it_leaves_no_process_no_file_and_no_signal_handler(self, folder: Path) -> None:
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        before = descendants(os.getpid())
        core = pair(folder)
        started = descendants(os.getpid()) - before
        files = Path(core._executor._cluster._folder)  # type: ignore[attr-defined]
        assert len(started) > 4 and files.is_dir()
        core.add_request(EngineRequest("r", [1, 2, 3], LONG, time.monotonic()))
        core.step()
        core.close()
        assert gone(started) and not files.exists()
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
