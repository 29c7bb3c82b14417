"""The executor of one device: what it refuses before a model is loaded, and a start that hangs."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from treadle_executor_uni import executor
from treadle_executor_uni.executor import UniProcExecutor

from treadle.config import from_options
from treadle.errors import ConfigError, EngineError
from treadle.plugins import PluginManager


def test_tensor_parallelism_needs_another_executor() -> None:
    config = from_options(model="nobody/nothing", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="choose 'mp'"):
        UniProcExecutor(config, PluginManager())


def sleeps() -> None:
    time.sleep(600)


def computes() -> None:
    while True:
        time.sleep(0)


def swallows() -> None:
    with contextlib.suppress(Exception):
        time.sleep(600)


@pytest.mark.parametrize(
    ("hang", "in_thread"),
    [(sleeps, False), (computes, False), (swallows, False), (computes, True)],
)
def test_a_start_that_hangs_ends_and_names_its_stage(
    hang: Callable[[], None],
    in_thread: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def start_runner(config: Any, plugins: Any, announce: Callable[[str], None]) -> None:
        announce("weights")
        hang()

    monkeypatch.setattr(executor, "start_runner", start_runner)
    config = from_options(model="nobody/nothing", startup_timeout=0.1)
    uni = executor.UniProcExecutor(config, PluginManager())
    handler = signal.getsignal(signal.SIGUSR2)
    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(uni.start).exception(30)
    else:
        with pytest.raises(EngineError) as caught:
            uni.start()
        error = caught.value
    assert isinstance(error, EngineError) and "stage 'weights'" in str(error)
    assert "startup_timeout" in str(error) and hang.__name__ in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR2) is handler
