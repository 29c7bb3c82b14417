"""Two real worker processes over gloo: same logits as one process, and honest deaths."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.errors import ConfigError, EngineDeadError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint

PROMPTS = [[5, 9, 200, 17], list(range(30, 70)), [1]]


def make(folder: Path, **options: Any) -> EngineCore:
    config = from_options(
        model=str(folder), device="cpu", dtype="float32", cpu_threads=1, num_pages=64, **options
    )
    return EngineCore(config, PluginManager(config.plugins))


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One key/value head for two ranks: they hold copies of it.
    return make_checkpoint(tmp_path_factory.mktemp("tp"), "Qwen3ForCausalLM", num_key_value_heads=1)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Any:
    core = make(folder, distributed_executor_backend="mp", tensor_parallel_size=2)
    yield core
    core.close()


def test_two_ranks_equal_one(folder: Path, pair: EngineCore) -> None:
    reference = make(folder)
    expected, actual = run(reference), run(pair)
    reference.close()
    for name, lines in expected.items():
        assert [token for token, _ in actual[name]] == [token for token, _ in lines]
        for (_, logprobs), (_, expected_logprobs) in zip(actual[name], lines, strict=True):
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


def test_a_killed_worker_ends_the_engine_and_leaves_no_orphan(pair: EngineCore) -> None:
    workers = list(pair._executor._workers)  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    pair.add_request(EngineRequest("r", [1, 2, 3], params, time.monotonic()))
    pair.step()
    pair.check_health()
    workers[1].send_signal(signal.SIGKILL)
    start_time = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        for _ in range(200):
            pair.step()
    with pytest.raises(EngineDeadError):
        pair.check_health()
    assert time.monotonic() - start_time < 30
    pair.close()
    assert all(worker.poll() is not None for worker in workers)


def test_an_error_at_start_is_the_workers_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="ranks"):
        make(folder, distributed_executor_backend="mp", tensor_parallel_size=3)
