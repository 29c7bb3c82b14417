"""Tiny checkpoints and engines, shared by the tests of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import TokenLogprobs
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager


class Driven:
    """An engine core and everything that came out of it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"max_step_ms": 0, **options}  # steps must not depend on the clock
        config = from_options(
            model=str(folder), device="cpu", dtype="float32", cpu_threads=1, **options
        )
        self.core = EngineCore(config, PluginManager(config.plugins))
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str | None] = {}
        self.cached: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        index, leader = params.pop("index", 0), params.pop("leader", None)
        bad_words, client = params.pop("bad_word_ids", []), params.pop("client", "")
        settings = SamplingParams(**{"temperature": 0.0, **params})
        arrival = params.get("arrival", time.monotonic())
        self.core.add_request(
            EngineRequest(name, list(prompt), settings, arrival, index, leader, bad_words, client)
        )
        self.tokens[name] = []
        self.logprobs[name] = []

    def step(self) -> None:
        for output in self.core.step():
            self.tokens[output.id] += output.token_ids
            self.logprobs[output.id] += output.logprobs or []
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[output.id] = output.prompt_logprobs
            if output.cached_tokens:
                self.cached[output.id] = output.cached_tokens
            if output.finish_reason is not None:
                self.reasons[output.id] = output.finish_reason
                self.errors[output.id] = output.error
        faults = self.core.scheduler.check_integrity()
        assert not faults, faults

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        assert self.core.stats.num_used_pages == 0


@pytest.fixture
def engine() -> Iterator[Callable[..., Driven]]:
    """Makes engines and closes them."""
    engines: list[Driven] = []

    def make(folder: Path, **options: Any) -> Driven:
        engines.append(Driven(folder, **options))
        return engines[-1]

    yield make
    for driven in engines:
        driven.core.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes each tiny checkpoint once."""
    from treadle.testing.checkpoints import make_checkpoint

    checkpoints: dict[str, Path] = {}

    def make(architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
        key = f"{architecture}{sorted(changes.items(), key=str)}"
        if key not in checkpoints:
            checkpoints[key] = make_checkpoint(
                tmp_path_factory.mktemp("tiny"), architecture, **changes
            )
        return checkpoints[key]

    return make
