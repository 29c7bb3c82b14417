"""Makes the helpers importable: those beside the tests, and a real server around a scripted engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "server")]

if TYPE_CHECKING:
    from treadle import LLM


@pytest.fixture
def odd() -> Iterator[Callable[..., LLM]]:
    """``odd(kind, method, failure, …)``: an engine with a plugin that goes wrong, closed afterwards."""
    from engines import config

    from treadle import LLM

    llms: list[LLM] = []

    def make(*fault: Any, **options: Any) -> LLM:
        llms.append(LLM(config=config(*fault, **options)))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


@pytest.fixture(scope="session")
def expected() -> list[int]:
    """What the demo model answers when nothing goes wrong."""
    from engines import config, finish

    from treadle import LLM

    with LLM(config=config("kernel_ops")) as llm:
        return finish(llm, {})[0].token_ids
