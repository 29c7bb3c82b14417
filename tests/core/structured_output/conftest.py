"""A tiny model with random weights, and engines that are always closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle import LLM
from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager


class Driven:
    """An engine core, and what came out of it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"cpu_threads": 1, "num_pages": 64, **options}
        config = from_options(model=str(folder), device="cpu", dtype="float32", **options)
        self.core = EngineCore(config, PluginManager(config.plugins))
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOutput] = {}

    def add(self, name: str, guided: StructuredOutputsParams | None = None, **params: Any) -> None:
        settings = SamplingParams(
            **{"temperature": 2.0, "seed": 1, "structured_outputs": guided, **params}
        )
        self.core.add_request(EngineRequest(name, [1, 2, 3], settings, time.monotonic()))
        self.tokens[name] = []

    def step(self) -> None:
        for output in self.core.step():
            self.tokens[output.id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.id] = output
        assert self.core.scheduler.check_integrity() == []

    def until(self, name: str, seconds: float = 60.0) -> TokenOutput:
        deadline = time.monotonic() + seconds
        while name not in self.ends:
            assert time.monotonic() < deadline, f"{name} does not end"
            self.step()
        return self.ends[name]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treadle.testing.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True, num_hidden_layers=1)


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., Driven]]:
    engines: list[Driven] = []

    def make(**options: Any) -> Driven:
        engines.append(Driven(folder, **options))
        return engines[-1]

    yield make
    for driven in engines:
        driven.core.close()


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), cpu_threads=1, num_pages=128, max_num_seqs=16) as llm:
        yield llm
        assert llm.stats.num_used_pages == 0
