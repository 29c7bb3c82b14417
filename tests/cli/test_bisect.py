"""The search for the distribution that makes a command fail, and commands that are run for it."""

from __future__ import annotations

import sys
from collections.abc import Collection

import pytest

from treadle_cli.bisect import culprits, succeeds

NAMES = ["acme", "beta", "gamma", "delta", "omega"]


@pytest.mark.parametrize("bad", [[name] for name in NAMES] + [["acme", "omega"], ["beta", "gamma"]])
def test_what_must_be_switched_off_is_found(bad: list[str]) -> None:
    runs: list[Collection[str]] = []

    def works_without(disabled: Collection[str]) -> bool:
        runs.append(disabled)
        return set(bad) <= set(disabled)

    assert culprits(NAMES, works_without) == bad
    assert len(runs) <= 2 * len(NAMES) + 2


@pytest.mark.parametrize("works", [True, False])
def test_nobody_is_to_blame(works: bool) -> None:
    assert culprits(NAMES, lambda disabled: works) == []


SCRIPT = "import os, sys, time; off = os.environ['TREADLE_DISABLED_PLUGINS'].split(','); "


@pytest.mark.parametrize(
    ("code", "until", "works"),
    [
        ("sys.exit('acme' not in off)", "", True),
        ("sys.exit('acme' in off)", "", False),
        ("print('http://', flush=True); time.sleep(60)", "://", True),
        ("sys.exit(0)", "://", False),
        ("time.sleep(60)", "", False),
        ("os.kill(os.getpid(), 11)", "", False),
    ],
)
def test_a_command_works_or_fails(code: str, until: str, works: bool) -> None:
    command = [sys.executable, "-SEc", SCRIPT + code]
    seconds = 0.3 if code == "time.sleep(60)" else 30.0
    assert succeeds(command, ["acme", "beta"], seconds=seconds, until=until) is works
