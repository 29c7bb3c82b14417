"""Every row of ``faults.toml`` has tests, and they exist."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_there_is_a_row_for_each_fault() -> None:
    assert list(ROWS) == [f"R{number:02}" for number in range(1, 46)]


@pytest.mark.parametrize("row", ROWS)
def test_its_tests_exist(row: str) -> None:
    assert ROWS[row].keys() == {"fault", "injected", "holds", "tests"}
    assert ROWS[row]["tests"]
    for test in ROWS[row]["tests"]:
        path, _, name = test.partition("::")
        assert name in functions(path), test
