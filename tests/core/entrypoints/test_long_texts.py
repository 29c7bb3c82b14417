"""Texts that take long to encode, or cannot fit, hold up nobody."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.api.sampling_params import SamplingParams
from treadle.entrypoints.async_llm import AsyncLLM
from treadle.errors import ContextLengthError, QueueFullError
from treadle.text.text_pool import NUM_THREADS

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # the engine process imports from where its parent does

PARAMS = SamplingParams(max_tokens=2)


class GatedTokenizer:
    """The tokenizer of a checkpoint, whose ``encode`` waits for a gate if the text is ``long``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.gate = threading.Event()
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        if text.startswith("wait"):
            assert self.gate.wait(30), "nothing ran beside the encoding"
        return [72] * (len(text) // 1000 + 1)


def watched(engine: AsyncLLM) -> GatedTokenizer:
    tokenizer = GatedTokenizer(engine._ready_processor.tokenizer)
    engine._ready_processor.tokenizer = tokenizer  # type: ignore[assignment]
    return tokenizer


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(tokenizer=True)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncLLM]:
    options: Any = {"max_num_queued_reqs": 1, "max_num_seqs": 1}
    async with AsyncLLM(str(folder), entry="echo_core:main", **options) as engine:
        yield engine


async def test_the_event_loop_goes_on_while_a_text_is_encoded(engine: AsyncLLM) -> None:
    tokenizer = watched(engine)
    preparing = asyncio.create_task(engine.prepare("wait" + "x" * 4000, PARAMS))
    while not tokenizer.texts:
        await asyncio.sleep(0.001)
    tokenizer.gate.set()
    assert (await preparing).prompt_ids == [72] * 5


async def test_more_texts_than_may_wait_are_refused(engine: AsyncLLM) -> None:
    tokenizer = watched(engine)
    texts = ["wait" + "x" * 4000] * (NUM_THREADS + 2)
    preparing = [asyncio.create_task(engine.prepare(text, PARAMS)) for text in texts]
    while len(tokenizer.texts) < NUM_THREADS:
        await asyncio.sleep(0.001)
    with pytest.raises(QueueFullError, match="2 texts of"):
        await engine.prepare("y" * 4000, PARAMS)
    tokenizer.gate.set()
    assert len(await asyncio.gather(*preparing)) == len(texts)
    assert (await engine.prepare("y" * 4000, PARAMS)).prompt_ids == [72] * 5


async def test_a_text_that_cannot_fit_is_not_encoded(engine: AsyncLLM) -> None:
    tokenizer = watched(engine)
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    text = "x" * (engine.info.max_model_len * longest + 1)
    with pytest.raises(ContextLengthError, match=f"at least {engine.info.max_model_len + 1} tok"):
        await engine.prepare(text, PARAMS)
    assert tokenizer.texts == []
    cut = await engine.prepare(text, PARAMS.replace(truncate_prompt_tokens=3))
    assert cut.prompt_ids == [72] * 3 and tokenizer.texts == [text]
