"""The table of perplexities is that of ``benchmarks/perplexity.py``, and its figures are what that measures."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
from repository import ROOT


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("perplexity", ROOT / "benchmarks/perplexity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def test_the_table_has_every_row_and_the_whole_text(benchmark: ModuleType) -> None:
    stored = json.loads(benchmark.RESULT.read_text())
    rows = [(row["format"], row["method"]) for row in stored["rows"]]
    assert rows == [(row.name, row.method) for row in benchmark.ROWS]
    assert len({row["tokens"] for row in stored["rows"]}) == 1


def test_figures_are_those_of_the_script(benchmark: ModuleType) -> None:
    """On a part of the text: the sizes of the table, and its order of perplexities."""
    stored = json.loads(benchmark.RESULT.read_text())["rows"]
    losses = []
    for name in ("bfloat16", "3 bits, groups of 128", "2 bits, groups of 128"):
        index = [row.name for row in benchmark.ROWS].index(name)
        measured = benchmark.measure(benchmark.ROWS[index], benchmark.pieces()[:6])
        assert measured["bytes"] == stored[index]["bytes"]
        losses.append(measured["perplexity"])
    assert 1 < losses[0] < losses[1] < losses[2]
