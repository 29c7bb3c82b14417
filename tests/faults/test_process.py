"""The same faults where the engine is a process of its own: what reaches the requests of a server."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from engines import PROMPT, config, failure_pattern

from treadle import AsyncLLM, SamplingParams
from treadle.errors import EngineDeadError, PluginLoadError, TreadleError
from treadle.outputs import CompletionOutput

FATAL = r" \(plugin_strict makes it fatal\)"


async def run_request(engine: AsyncLLM, prompt: Any = PROMPT, **params: Any) -> CompletionOutput:
    """One request to its end; raises what its reader is told."""
    plain = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "output_kind": "final"}
    async for output in engine.generate(prompt, SamplingParams(**{**plain, **params})):
        last = output.outputs[0]
    return last


async def gather_results(*requests: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)


async def test_a_failed_step_costs_its_requests_and_the_process_goes_on(
    expected: list[int],
) -> None:
    """One request after the other: the second and third call of the model are the first request's."""
    async with AsyncLLM(
        config=config("models", "forward", "Panic", first_call=3, times=1)
    ) as engine:
        failed = await run_request(engine)
        assert failed.finish_reason == "error" and failed.token_ids == expected[:2]
        message = "the step failed: " + failure_pattern("models", "forward", "Panic: odd")
        assert re.fullmatch(message, str(failed.error))
        for output in await gather_results(*[run_request(engine) for _ in range(3)]):
            assert output.token_ids == expected
        stats = await engine.stats()
        assert stats.num_used_pages == stats.num_running == 0 and engine.alive
        assert ("models:OddForCausalLM", "forward", "error", 1) in stats.plugin_calls


@pytest.mark.parametrize(
    ("kind", "method", "options", "params"),
    [
        ("executors", "execute_model", {"first_call": 3}, {}),
        ("scheduling_policies", "sort_key", {"plugin_strict": True}, {"priority": 1}),
    ],
)
async def test_what_ends_the_engine_is_told_to_everybody(
    kind: str, method: str, options: dict[str, Any], params: dict[str, Any]
) -> None:
    cause = failure_pattern(kind, method) + (FATAL if "plugin_strict" in options else "")
    async with AsyncLLM(config=config(kind, method, **options)) as engine:
        long = run_request(engine, max_tokens=1000)
        for outcome in await gather_results(
            long, run_request(engine, **params), run_request(engine, **params)
        ):
            assert isinstance(outcome, EngineDeadError) and re.search(cause, str(outcome)), outcome
        assert not engine.alive
        with pytest.raises(EngineDeadError, match=cause):
            await run_request(engine)


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        ("RuntimeError", PluginLoadError, failure_pattern("models", "build")),
        ("SystemExit", PluginLoadError, "SystemExit: odd"),
    ],
)
async def test_a_start_that_fails_in_the_process_is_told_here(
    failure: str, error: type[TreadleError], words: str
) -> None:
    engine = AsyncLLM(config=config("models", "build", failure))
    with pytest.raises(error, match=words):
        await engine.start()
    await engine.shutdown()


async def test_a_tokenizer_fails_here_and_the_process_does_not_hear_of_it(
    expected: list[int],
) -> None:
    """Of three texts at once one cannot be made: three times the same tokens come."""
    async with AsyncLLM(config=config("tokenizers", "flush", times=1)) as engine:
        outputs = await gather_results(*[run_request(engine) for _ in range(3)])
        assert sorted(str(o.finish_reason) for o in outputs) == ["error", "length", "length"]
        (failed,) = (o for o in outputs if o.finish_reason == "error")
        assert re.search(failure_pattern("tokenizers", "flush"), str(failed.error))
        assert (await run_request(engine)).token_ids == expected
        assert ("tokenizers:odd", "flush", "error", 1) in engine.plugins.call_stats.rows()
        assert (await engine.stats()).num_used_pages == 0
