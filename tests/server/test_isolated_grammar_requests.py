"""Requests to an engine whose grammar backend is isolated, and the suite of the kind for those installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grammar_plugin import close, process_of, write_plugin

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.config import PluginConfig, from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.structured_output import StructuredOutputSuite


class Engine:
    """An engine core with a tiny model, and what came out of it."""

    def __init__(self, folder: Path, file: str) -> None:
        options: dict[str, Any] = {
            "isolate": ["structured_output:mine"],
            "plugin_file": [file],
        }
        config = from_options(
            model=str(folder), device="cpu", dtype="float32", cpu_threads=1, num_pages=64, **options
        )
        self.plugins = PluginManager(config.plugins)
        self.core = EngineCore(config, self.plugins)

    def run(self, first: str, *others: str | None) -> list[TokenOutput]:
        """Return how requests with these grammars end; the others come once the first has a token."""
        ends: dict[str, TokenOutput] = {}
        waiting = list(enumerate(others, 1))
        self.add(0, first)
        deadline = time.monotonic() + 60
        while len(ends) <= len(others):
            assert time.monotonic() < deadline, f"{ends} is all that ends"
            for output in self.core.step():
                while waiting:
                    self.add(*waiting.pop(0))
                if output.finish_reason is not None:
                    ends[output.id] = output
            assert self.core.scheduler.check_integrity() == []
        return [ends[str(index)] for index in range(len(others) + 1)]

    def add(self, index: int, source: str | None) -> None:
        guided = source and StructuredOutputsParams(regex=source, backend="mine")
        params = {"ignore_eos": True, "max_tokens": 30} if guided is None else {}
        settings = SamplingParams(temperature=2.0, seed=1, structured_outputs=guided, **params)
        self.core.add_request(EngineRequest(str(index), [1, 2, 3], settings, time.monotonic()))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True)
    engine = Engine(folder, write_plugin(tmp_path_factory.mktemp("plugin")))
    yield engine
    engine.core.close()
    close(engine.plugins)


@pytest.mark.parametrize("fault", ["raise", "exit"])
def test_an_engine_goes_on(engine: Engine, fault: str) -> None:
    """The grammar compiles in a process with limits first, and its fault comes in a step."""
    engine.run("ab" * 6)  # Its grammar is kept, so that its request begins while the bad one runs.
    bad, fine, free = engine.run(f"{'ab' * 3}~accept {fault} 5", "ab" * 6, None)
    assert bad.finish_reason == "error" and "structured_output:mine from mine_" in str(bad.error)
    assert fine.finish_reason == ("stop" if fault == "raise" else "error")
    assert free.finish_reason == "length" and len(free.token_ids)
    assert engine.run("ab" * 6)[0].finish_reason == "stop", (
        "it was compiled by a process that is lost"
    )


def test_a_grammar_that_nobody_can_compile_costs_no_other(engine: Engine) -> None:
    """It dies in a fork of the process that compiles first: others keep what they have."""
    engine.run("ab")
    generation = process_of(engine.plugins).generation
    fine, bad = engine.run("ab" * 6, "a~compile exit 0")
    assert fine.finish_reason == "stop"
    assert "could not be compiled by 'mine'" in str(bad.error)
    assert process_of(engine.plugins).generation == generation


# ------------------------------------------------------------------------ the suite of the kind


@cache
def isolated(id: str) -> PluginManager:
    return PluginManager(PluginConfig(isolate=[id]))


class IsolatedSuite(StructuredOutputSuite):
    def plugin_manager(self) -> PluginManager:
        return isolated(self.plugin)


@pytest.mark.slow
class TestIsolatedLLGuidance(IsolatedSuite):
    plugin = "structured_output:llguidance"


@pytest.mark.slow
class TestIsolatedOutlines(IsolatedSuite):
    plugin = "structured_output:outlines"


@pytest.mark.slow
class TestIsolatedLMFormatEnforcer(IsolatedSuite):
    plugin = "structured_output:lm-format-enforcer"
