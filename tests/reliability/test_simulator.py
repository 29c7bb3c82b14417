"""A short run of ``simulate.py``: no violation, the same events for a seed, and bugs that are found."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulate import find_bug, replay, run
from simulator.bugs import BUGS

STEPS = 100_000


def test_many_episodes_without_a_violation() -> None:
    result = run(STEPS, seed=0)
    assert result.violations == []
    assert result.num_steps == STEPS and result.num_engine_steps > STEPS / 10


def test_a_seed_names_its_events() -> None:
    """In a process of its own, so that hashes of strings and addresses are others."""
    command = [sys.executable, str(Path(__file__).with_name("simulate.py")), "--replay", "16"]
    first, other = ("".join(f"{line}\n" for line in replay(seed)) for seed in (16, 8))
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert first == again != other
    assert first.count("\n") > 100


def test_the_shell_that_started_a_run_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = itertools.count(1)
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    assert run(3000, seed=0).violations == []


@pytest.mark.parametrize(
    "name",
    [
        "the cache salt is ignored",
        "a slow grammar is not compiled anew",
        "the death of the engine is told to one reader",
    ],
)
def test_planted_bugs_are_found(name: str) -> None:
    found = find_bug(name, range(40))
    assert found is not None
    assert str(found[1]).startswith("seed ")


def test_all_bugs_can_be_planted() -> None:
    for bug in BUGS.values():
        with bug.planted():
            pass
