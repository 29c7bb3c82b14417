"""The faults that ``run_mutants.py`` plants in the core still have a place in it."""

from __future__ import annotations

import pytest
from run_mutants import TABLE, mutated


@pytest.mark.parametrize("mutant", TABLE["mutant"], ids=lambda m: f"{m['file']}: {m['old']:.40}")
def test_a_mutant_applies(mutant: dict[str, str]) -> None:
    compile(mutated(mutant), mutant["file"], "exec")


def test_there_are_enough() -> None:
    assert len(TABLE["mutant"]) >= 40
