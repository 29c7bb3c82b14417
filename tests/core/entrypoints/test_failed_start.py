"""A start that fails leaves nothing open of what it has read."""

from __future__ import annotations

import asyncio

import pytest

from treadle import LLM
from treadle.engine import core
from treadle.entrypoints.async_llm import AsyncLLM
from treadle.errors import EngineError, TreadleError
from treadle.text.assets import FrontendAssets

MODEL = "demo:treadle-demo"


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[FrontendAssets]:
    """The assets that were closed."""
    assets: list[FrontendAssets] = []
    close = FrontendAssets.close

    def record(self: FrontendAssets) -> None:
        assets.append(self)
        close(self)

    monkeypatch.setattr(FrontendAssets, "close", record)
    return assets


def test_an_engine_in_this_process(
    closed: list[FrontendAssets], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("no memory is left")

    monkeypatch.setattr(core, "EngineCore", fail)
    with pytest.raises(EngineError, match="no memory"):
        LLM(MODEL)
    assert len(closed) == 1


async def test_an_engine_in_a_child(closed: list[FrontendAssets]) -> None:
    engine = AsyncLLM(MODEL, entry="treadle.engine.process:nothing_of_this_name")
    with pytest.raises(TreadleError):
        await engine.start()
    await engine.shutdown()
    async with asyncio.timeout(60):  # a start that fails does not wait for what it reads beside
        while not closed:
            await asyncio.sleep(0.01)
    assert len(closed) == 1


async def test_a_renderer_that_does_not_start(
    closed: list[FrontendAssets], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FrontendAssets) -> None:
        raise EngineError("no process can be started")

    monkeypatch.setattr(FrontendAssets, "start", fail)
    engine = AsyncLLM(MODEL)
    with pytest.raises(EngineError, match="no process"):
        await engine.start()
    await engine.shutdown()
    assert len(closed) == 1
