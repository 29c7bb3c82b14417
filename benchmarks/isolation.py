"""What a call of an isolated plugin costs beside one in this process.

One JSON line for each plugin: microseconds of a call, here and in a process of its own, by turns, and
the seconds and the memory that the process takes.

    python benchmarks/isolation.py --calls 5000
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from treadle.api.kinds import REASONING_PARSERS, TOKENIZERS, TOOL_PARSERS
from treadle.api.types import ModelFiles, Tool
from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_tokenizer
from treadle_server.child_processes import resident_bytes

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
    arguments.add_argument("--folder", type=Path, default=Path("benchmark-tokenizer"))
    options = arguments.parse_args()
    options.folder.mkdir(exist_ok=True)
    make_tokenizer(options.folder)
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


if __name__ == "__main__":
    main()
