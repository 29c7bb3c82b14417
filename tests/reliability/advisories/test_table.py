"""Every advisory is held by tests that exist, or says why it does not apply."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("advisories.toml").read_text()
)
FOLDERS = ("tests/", "core/treadle/testing/")


@cache
def find_tests(path: str) -> frozenset[str]:
    """Return the tests that a file defines, ``Class::test`` for methods. Nothing is imported."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            functions, prefix = node.body, f"{node.name}::"
        else:
            functions, prefix = [node], ""
        found |= {
            prefix + f.name
            for f in functions
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) and f.name.startswith("test")
        }
    return frozenset(found)


@pytest.mark.parametrize("id", TABLE)
def test_an_advisory_is_held_or_does_not_apply(id: str) -> None:
    row = TABLE[id]
    assert row["advisory"] and row["what"].endswith(".")
    assert {*row} <= {"advisory", "what", "held_by", "not_applicable"}
    if "not_applicable" in row:
        assert row["not_applicable"] and "held_by" not in row
        return
    assert row["held_by"], "name the tests that hold it, or say why it does not apply"
    for node in row["held_by"]:
        path, _, name = node.partition("::")
        assert path.startswith(FOLDERS) and (ROOT / path).is_file(), f"there is no file {path}"
        assert name in find_tests(path), f"there is no test {node}"


def test_no_advisory_is_lost() -> None:
    ids = [identifier for row in TABLE.values() for identifier in [row["advisory"]]]
    assert len(TABLE) >= 101 and len(set(ids)) == len(ids)


def test_a_test_that_does_not_exist_is_found() -> None:
    assert "test_no_advisory_is_lost" in find_tests(Path(__file__).relative_to(ROOT).as_posix())
    assert "StreamParserSuite::test_time_is_linear" in find_tests("core/treadle/testing/streams.py")
    assert "test_nothing_of_this_name" not in find_tests("tests/server/test_limits.py")
