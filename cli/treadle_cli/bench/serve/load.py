"""Sends requests at their times and notes when their answers arrive."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from treadle.errors import EngineError, TreadleError
from treadle_cli.bench.serve.config import ServeBenchConfig
from treadle_cli.bench.serve.datasets import Prompt, WordCost, words
from treadle_cli.bench.serve.measure import Record
from treadle_cli.client import Event, Server

__all__ = ("arrivals", "body_of", "calibrate", "run_load", "send")

CALIBRATION_WORDS = (1, 201)
PATHS = {"completions": "/completions", "chat": "/chat/completions"}


def arrivals(config: ServeBenchConfig, count: int) -> list[float]:
    """Return when each request begins, in seconds; all at 0 without a rate.

    The gaps are scaled so that few requests, too, have the mean rate.
    """
    if config.request_rate is None:
        return [0.0] * count
    draw = random.Random(config.seed + 1)
    gaps = [draw.gammavariate(config.burstiness, 1.0) for _ in range(count - 1)]
    scale = (count - 1) / config.request_rate / sum(gaps) if sum(gaps) else 0.0
    return list(itertools.accumulate((gap * scale for gap in gaps), initial=0.0))


def body_of(config: ServeBenchConfig, model: str, prompt: Prompt) -> dict[str, Any]:
    """Return the JSON of a request."""
    body: dict[str, Any] = {"model": model, "max_tokens": prompt.output_len, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if config.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt.text}]
    else:
        body["prompt"] = prompt.text
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if config.ignore_eos:
        body["ignore_eos"] = True
    return body | config.extra_body


async def send(
    server: Server, path: str, body: Mapping[str, Any], record: Record, epoch: float
) -> None:
    """Send one request and fill its record. A failure is in ``record.error``."""
    record.start = time.perf_counter() - epoch
    num_events = 0
    try:
        async with aclosing(server.stream(path, body)) as events:  # type: ignore[type-var]
            async for now, event in events:
                if event.usage is not None:
                    record.prompt_tokens = event.usage.prompt_tokens
                    record.output_tokens = event.usage.completion_tokens
                if has_text(event):
                    num_events += 1
                    record.arrived(now - epoch)
        record.output_tokens = record.output_tokens or num_events
        if not num_events and not record.output_tokens:
            raise EngineError("the answer has no token")
    except TreadleError as error:
        record.error = str(error)
    record.end = time.perf_counter() - epoch


def has_text(event: Event) -> bool:
    for choice in event.choices:
        delta = choice.delta
        if choice.text or (delta and (delta.content or delta.thought or delta.tool_calls)):
            return True
    return False


async def calibrate(server: Server, config: ServeBenchConfig, model: str) -> WordCost:
    """Ask the server how many tokens its tokenizer makes of words. Raises what a request raises."""
    counts, draw = [], random.Random(0)
    for count in CALIBRATION_WORDS:
        record, prompt = Record(), Prompt(words(draw, count), 1)
        body = body_of(config, model, prompt)
        await send(server, PATHS[config.endpoint], body, record, time.perf_counter())
        if record.error is not None:
            raise EngineError(record.error)
        counts.append(record.prompt_tokens)
    if counts[1] <= counts[0]:
        return WordCost()  # the server does not count
    per_word = (counts[1] - counts[0]) / (CALIBRATION_WORDS[1] - CALIBRATION_WORDS[0])
    return WordCost(per_word, max(0.0, counts[0] - per_word))


async def run_load(
    server: Server,
    config: ServeBenchConfig,
    model: str,
    prompts: Sequence[Prompt],
    done: Callable[[], None] = lambda: None,
) -> tuple[list[Record], float]:
    """Send all prompts and return their records, and the seconds until the last was answered."""
    bodies = [body_of(config, model, prompt) for prompt in prompts]
    records = [Record(due=due) for due in arrivals(config, len(prompts))]
    gate = asyncio.Semaphore(config.max_concurrency or len(prompts))
    epoch = time.perf_counter()

    async def request(body: Mapping[str, Any], record: Record) -> None:
        async with gate:
            await send(server, PATHS[config.endpoint], body, record, epoch)
        done()

    async with asyncio.TaskGroup() as group:
        for body, record in zip(bodies, records, strict=True):
            wait = record.due - (time.perf_counter() - epoch)
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(request(body, record))
    return records, time.perf_counter() - epoch
