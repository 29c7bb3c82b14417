"""The same faults where the engine is a process of its own: what reaches the requests of a server."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from engines import PROMPT, config, named

from treadle import AsyncLLM, SamplingParams
from treadle.errors import EngineDeadError, EngineError, PluginLoadError, TreadleError
from treadle.outputs import CompletionOutput

FATAL = r" \(plugin_strict makes it fatal\)"


async def answered(engine: AsyncLLM, prompt: Any = PROMPT, **params: Any) -> CompletionOutput:
    """One request to its end; raises what its reader is told."""
    plain = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "output_kind": "final"}
    async for output in engine.generate(prompt, SamplingParams(**{**plain, **params})):
        last = output.outputs[0]
    return last


async def told(*requests: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)


async def test_a_failed_step_costs_its_requests_and_the_process_goes_on(
    expected: list[int],
) -> None:
    """One request after the other: the second and third call of the model are the first request's."""
    async with AsyncLLM(config=config("models", "forward", "Panic", at=3, times=1)) as engine:
        failed = await answered(engine)
        assert failed.finish_reason == "error" and failed.token_ids == expected[:2]
        said = "the step failed: " + named("models", "forward", "Panic: odd")
        assert re.fullmatch(said, str(failed.error))
        for output in await told(*[answered(engine) for _ in range(3)]):
            assert output.token_ids == expected
        stats = await engine.stats()
        assert stats.num_used_pages == stats.num_running == 0 and engine.alive
        assert ("models:OddForCausalLM", "forward", "error", 1) in stats.plugin_calls


@pytest.mark.parametrize(
    ("kind", "method", "options", "params"),
    [
        ("executors", "execute_model", {"at": 3}, {}),
        ("scheduling_policies", "sort_key", {"plugin_strict": True}, {"priority": 1}),
    ],
)
async def test_what_ends_the_engine_is_told_to_everybody(
    kind: str, method: str, options: dict[str, Any], params: dict[str, Any]
) -> None:
    cause = named(kind, method) + (FATAL if "plugin_strict" in options else "")
    async with AsyncLLM(config=config(kind, method, **options)) as engine:
        long = answered(engine, max_tokens=1000)
        for outcome in await told(long, answered(engine, **params), answered(engine, **params)):
            assert isinstance(outcome, EngineDeadError) and re.search(cause, str(outcome)), outcome
        assert not engine.alive
        with pytest.raises(EngineDeadError, match=cause):
            await answered(engine)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("RuntimeError", PluginLoadError, named("models", "build")),
        ("SystemExit", EngineError, "SystemExit: odd"),
    ],
)
async def test_a_start_that_fails_in_the_process_is_told_here(
    how: str, error: type[TreadleError], words: str
) -> None:
    engine = AsyncLLM(config=config("models", "build", how))
    with pytest.raises(error, match=words):
        await engine.start()
    await engine.shutdown()


async def test_a_tokenizer_fails_here_and_the_process_does_not_hear_of_it(
    expected: list[int],
) -> None:
    """Of three texts at once one cannot be made: three times the same tokens come."""
    async with AsyncLLM(config=config("tokenizers", "flush", times=1)) as engine:
        outputs = await told(*[answered(engine) for _ in range(3)])
        assert sorted(str(o.finish_reason) for o in outputs) == ["error", "length", "length"]
        (failed,) = (o for o in outputs if o.finish_reason == "error")
        assert re.search(named("tokenizers", "flush"), str(failed.error))
        assert (await answered(engine)).token_ids == expected
        assert ("tokenizers:odd", "flush", "error", 1) in engine.plugins.call_stats.rows()
        assert (await engine.stats()).num_used_pages == 0
