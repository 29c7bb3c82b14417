"""One run of ``treadle bench serve``: calibrate, warm up, measure, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from treadle.errors import ConfigError, EngineError, RequestError
from treadle_cli.bench.percentiles import summarize
from treadle_cli.bench.serve.capacity import readable_tokens_per_second
from treadle_cli.bench.serve.config import ServeBenchConfig
from treadle_cli.bench.serve.datasets import prompts
from treadle_cli.bench.serve.load import calibrate, run_load
from treadle_cli.bench.serve.measure import (
    ClientStats,
    Record,
    ServeResult,
    parse_goodput,
    summarize_run,
)
from treadle_cli.client import Server

__all__ = ("bench_serve", "write_result")


def bench_serve(
    config: ServeBenchConfig, api_key: str | None, progress: Callable[[str], None]
) -> tuple[ServeResult, list[Record]]:
    """Load a server and return the figures. Raises ``TreadleError`` if no request was answered.

    ``progress`` is told what happens now.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_bench(config, api_key, progress))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _headers(config: ServeBenchConfig) -> dict[str, str]:
    headers = {}
    for text in config.header:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--header is {text!r}; write NAME=VALUE")
        headers[name] = value
    return headers


async def _bench(
    config: ServeBenchConfig, api_key: str | None, progress: Callable[[str], None]
) -> tuple[ServeResult, list[Record]]:
    objectives = parse_goodput(config.goodput)
    server = Server(config.base_url, api_key, _headers(config))
    try:
        progress("measuring this client")
        capacity = await readable_tokens_per_second()
        progress("asking the server")
        model = config.model or await _first_model(server)
        requests = prompts(config, await calibrate(server, config, model))
        for i in range(config.num_warmups):
            progress(f"warming up, {i + 1} of {config.num_warmups}")
            warmup = [replace(requests[i % len(requests)])]
            await run_load(server, config, model, warmup)
        num_done = 0

        def done() -> None:
            nonlocal num_done
            num_done += 1
            progress(f"{num_done} of {len(requests)} requests")

        progress(f"0 of {len(requests)} requests")
        cpu_time = time.process_time()
        records, wall = await run_load(server, config, model, requests, done)
        cpu_time = time.process_time() - cpu_time
    finally:
        server.close()
    late = [record.start - record.due for record in records]
    result = summarize_run(
        records,
        wall,
        objectives,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        base_url=str(server.address),
        model=model,
        endpoint=config.endpoint,
        dataset=config.dataset_name,
        request_rate=config.request_rate,
        burstiness=config.burstiness,
        max_concurrency=config.max_concurrency,
        client=ClientStats(
            cpu_share=round(cpu_time / max(wall, 1e-9), 3),
            readable_tokens_per_second=round(capacity),
            late_ms=summarize(late),
        ),
    )
    if not result.completed:
        raise EngineError(f"no request was answered: {next(iter(result.errors))}")
    return result, records


async def _first_model(server: Server) -> str:
    names = await server.models()
    if not names:
        raise RequestError(f"{server.address} lists no model; name one")
    return names[0]


def write_result(path: Path, result: ServeResult, records: Sequence[Record]) -> None:
    """Write the figures and every request as JSON. Raises ``ConfigError``."""
    content: dict[str, Any] = msgspec.to_builtins(result)
    content["records"] = [msgspec.to_builtins(record) for record in records]
    try:
        path.write_bytes(msgspec.json.encode(content) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
