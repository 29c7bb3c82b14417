"""What a call of an isolated plugin costs beside one in this process.

One JSON line for each parser: microseconds of a call, here and in a process of its own, by turns, and
the seconds and the memory that the process takes.

One for the routes of a server plugin: microseconds of a request for a page, in turn and many at once, from
the server's gateway on, without sockets.

One more for each grammar backend and number of rows: microseconds of a step, in which each row gets a mask and
accepts a token. ``by_row`` is the same with a call for each row instead of one for all of them.

    python benchmarks/isolation.py --calls 5000 --vocab 151936
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from structured_output import Synthetic

from treadle.api.kinds import REASONING_PARSERS, STRUCTURED_OUTPUT, TOKENIZERS, TOOL_PARSERS
from treadle.api.types import GrammarSpec, ModelFiles, SupportsGrammarBatches, Tool
from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle.structured_output import StructuredOutputState
from treadle.structured_output.batch import GrammarBatch, GrammarRow
from treadle.testing.checkpoints import make_tokenizer
from treadle_server.app import create_app
from treadle_server.child_processes import resident_bytes
from treadle_server.config import server_from_options
from treadle_server.context import ServerContext
from treadle_server.testing.client import ask
from treadle_server.testing.engine import FakeEngine

ROUNDS = 7
TEXT = " plain words"


def parser(kind: Any, key: str, folder: Path, *, isolate: bool) -> Any:
    """Return a guarded parser, as a server feeds it."""
    config = PluginConfig(isolate=[f"{kind.name}:{key}"] if isolate else [])
    plugins = PluginManager(config)
    files = ModelFiles(folder, tuple(p.name for p in folder.iterdir()), {})
    tokenizer = plugins.create(TOKENIZERS, "auto", files=files)
    more = {"tools": (Tool("f", "", {}),)} if kind is TOOL_PARSERS else {"prompt": ""}
    return plugins.create_guarded(kind, key, tokenizer=tokenizer, **more)


def microseconds(call: Callable[[], object], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - start) / calls * 1e6


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--calls", type=int, default=5000)
    arguments.add_argument("--vocab", type=int, default=151936)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments.add_argument("--backends", nargs="*", default=["llguidance", "outlines"])
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        make_tokenizer(options.folder)
        parsers(options)
        asyncio.run(routes(options))
        for key in options.backends:
            grammars(key, options)


def parsers(options: argparse.Namespace) -> None:
    for kind, key in ((TOOL_PARSERS, "hermes"), (REASONING_PARSERS, "qwen3")):
        start = perf_counter()
        isolated = parser(kind, key, options.folder, isolate=True)
        seconds = perf_counter() - start
        here = parser(kind, key, options.folder, isolate=False)
        times: dict[str, list[float]] = {"here": [], "isolated": []}
        for _ in range(ROUNDS):
            times["here"].append(microseconds(lambda p=here: p.feed(TEXT, (1, 2)), options.calls))
            times["isolated"].append(
                microseconds(lambda p=isolated: p.feed(TEXT, (1, 2)), options.calls)
            )
        figures = {name: round(statistics.median(values), 1) for name, values in times.items()}
        memory = resident_bytes().get("isolated", 0) >> 20
        result = {"plugin": f"{kind.name}:{key}", **figures, "start_seconds": round(seconds, 2)}
        print(json.dumps({**result, "resident_mib": memory}))


@asynccontextmanager
async def page_server(*isolate: str) -> AsyncIterator[Any]:
    """Yield the gateway of a server with the web page, in this process or not."""
    context = ServerContext(
        FakeEngine(PluginManager(PluginConfig(isolate=list(isolate))), "model"),
        server_from_options({"api_key": [], "admin_api_key": []}),
    )
    gateway = create_app(context)
    await context.app_instance.start()
    try:
        yield gateway
    finally:
        await context.app_instance.stop()
        context.close()


async def routes(options: argparse.Namespace) -> None:
    async with page_server() as here:
        start = perf_counter()
        async with page_server("server:web_ui") as isolated:
            seconds = perf_counter() - start
            memory = resident_bytes().get("isolated", 0) >> 20
            for at_once in (1, 32):
                figures = await requests({"here": here, "isolated": isolated}, at_once, options)
                result = {"plugin": "server:web_ui", "requests_at_once": at_once, **figures}
                rest = {"start_seconds": round(seconds, 2), "resident_mib": memory}
                print(json.dumps({**result, **rest}))


async def requests(
    gateways: dict[str, Any], at_once: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return microseconds of a request, by turns."""

    async def client(gateway: Any, count: int) -> None:
        for _ in range(count):
            answer = await ask(gateway, "GET", "/ui")
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}")

    times: dict[str, list[float]] = {name: [] for name in gateways}
    count = max(1, options.calls // 10 // at_once)
    for _ in range(ROUNDS):
        for name, gateway in gateways.items():
            start = perf_counter()
            await asyncio.gather(*(client(gateway, count) for _ in range(at_once)))
            times[name].append((perf_counter() - start) / count / at_once * 1e6)
    return {name: round(statistics.median(values)) for name, values in times.items()}


class Steps:
    """Rows inside a JSON string, which take a letter in each step, in a backend of this process or not."""

    def __init__(self, key: str, tokenizer: Any, vocab: int, *, isolate: bool) -> None:
        name = f"{STRUCTURED_OUTPUT.name}:{key}"
        self.plugins = PluginManager(PluginConfig(isolate=[name] if isolate else []))
        start = perf_counter()
        self.compiler = self.plugins.create_guarded(
            STRUCTURED_OUTPUT, key, tokenizer=tokenizer, vocab_size=vocab
        )
        self.ready_seconds = perf_counter() - start
        self.grammar = self.compiler.compile(GrammarSpec("regex", '"[a-z ]+"'))
        self._vocab = vocab
        self._quote, self._letter = (tokenizer.encode(c, add_special_tokens=False) for c in '"a')

    def states(self, rows: int, *, together: bool) -> list[StructuredOutputState]:
        batches = None
        if together and isinstance(self.compiler, SupportsGrammarBatches):
            batches = self.compiler
        found = [
            StructuredOutputState(self.grammar.matcher(), batches=batches) for _ in range(rows)
        ]
        GrammarBatch(_rows(found)).accept_tokens([self._quote[0]] * rows)
        return found

    def microseconds(self, states: list[StructuredOutputState], steps: int) -> float:
        bitmask = torch.empty((len(states), self._vocab // 32 + 1), dtype=torch.int32)
        batch, letters = GrammarBatch(_rows(states)), [self._letter[0]] * len(states)

        def step() -> None:
            batch.fill_bitmasks(bitmask, self._vocab)
            batch.accept_tokens(letters)

        taken = microseconds(step, steps)
        assert not any(state.has_ended for state in states), states[0].error
        return taken


def _rows(states: list[StructuredOutputState]) -> list[GrammarRow]:
    return [(i, state, (), ()) for i, state in enumerate(states)]


def grammars(key: str, options: argparse.Namespace) -> None:
    tokenizer = Synthetic(options.vocab)
    here = Steps(key, tokenizer, options.vocab, isolate=False)
    apart = Steps(key, tokenizer, options.vocab, isolate=True)
    memory = resident_bytes().get("isolated", 0) >> 20
    for rows in options.rows:
        steps = max(3, 500 // rows)
        columns = {
            "here": (here, here.states(rows, together=True)),
            "isolated": (apart, apart.states(rows, together=True)),
            "by_row": (apart, apart.states(rows, together=False)),
        }
        times: dict[str, list[float]] = {name: [] for name in columns}
        for _ in range(ROUNDS):
            for name, (side, states) in columns.items():
                times[name].append(side.microseconds(states, steps))
        figures = {name: round(statistics.median(values)) for name, values in times.items()}
        ready = {"here": round(here.ready_seconds, 2), "isolated": round(apart.ready_seconds, 2)}
        print(
            json.dumps(
                {
                    "plugin": f"{STRUCTURED_OUTPUT.name}:{key}",
                    "rows": rows,
                    "microseconds_of_a_step": figures,
                    "ready_seconds": ready,
                    "resident_mib": memory,
                }
            )
        )


if __name__ == "__main__":
    main()
