"""Starts without collections of garbage, and what they leave behind."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.config import from_options
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle_worker_kit.garbage import without_collections
from treadle_worker_kit.start import start_runner

IMPORTS = """
import gc, sys
from treadle.config import from_options
from treadle_executor_uni import treadle_executor
config = from_options(model="m")
collections = []
gc.callbacks.append(lambda phase, info: collections.append("torch" in sys.modules))
treadle_executor("uni", config, None)
print("torch" in sys.modules, collections.count(True), gc.isenabled())
"""


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """The tests' own process has frozen what it imported."""
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()
    gc.enable()


def test_what_the_caller_had_returns() -> None:
    with pytest.raises(ValueError, match="of a start"), without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("of a start")
    assert gc.isenabled()
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()


def test_what_was_made_is_not_looked_at_at_once() -> None:
    collections: list[str] = []

    def count(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    made: list[list[object]] = []
    gc.collect()
    gc.callbacks.append(count)
    try:
        with without_collections():
            made += [[] for _ in range(10**5)]
        made += [[] for _ in range(100)]
    finally:
        gc.callbacks.remove(count)
    assert collections == []


def test_what_a_program_has_frozen_stays_so() -> None:
    gc.freeze()
    with without_collections():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_a_start_collects_nothing(tmp_path: Path) -> None:
    config = from_options(model=str(make_checkpoint(tmp_path)), device="cpu", num_pages=8)
    enabled: list[bool] = []
    start_runner(
        config,
        PluginManager(config.plugins),
        announce=lambda stage: enabled.append(gc.isenabled()),
    )
    assert enabled and not any(enabled)
    assert gc.isenabled()


def test_the_import_of_torch_collects_nothing() -> None:
    command = [sys.executable, "-c", IMPORTS]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported, count, enabled = result.stdout.split()
    assert (imported, enabled) == ("True", "True")
    assert int(count) < 10  # it would be hundreds
