"""The CPU time in which tool parsers read a megabyte that comes in pieces of four characters.

    python benchmarks/parsers.py [NAME ...]

Three texts for each format: one call with a long text, many calls, and prose that has none. The least of
some runs is taken, as seconds for a megabyte.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from treadle.api.kinds import TOOL_PARSERS
from treadle.testing.streams import CodePointTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/plugins/tool_parsers"))
from test_formats import ARGUMENTS, FORMATS, PLUGINS, TOOLS, Call, cut

SIZE = 250_000
PIECE = 4
RUNS = 6
PROSE = "The quick brown fox, a < b; {see} [1] jumps over. \n"
CODE = 'line of code = {x: [1]}; "q"\n'


def texts(write: Callable[[list[Call]], str]) -> Iterator[tuple[str, str]]:
    yield "one call", write([("get_weather", {"text": CODE * (SIZE // len(CODE))})])
    calls: list[Call] = [("get_weather", ARGUMENTS[i % len(ARGUMENTS)]) for i in range(SIZE // 70)]
    yield "many calls", write(calls)
    yield "prose", PROSE * (SIZE // len(PROSE))


def seconds(key: str, pieces: list[str]) -> float:
    parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=CodePointTokenizer(), tools=TOOLS)  # type: ignore[arg-type]
    start = time.process_time()
    for piece in pieces:
        parser.feed(piece, ())
    parser.finish()
    return time.process_time() - start


def main() -> None:
    for name, (key, write) in FORMATS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        row = []
        for title, text in texts(write):
            pieces = cut(text, PIECE)
            best = min(seconds(key, pieces) for _ in range(RUNS))
            row.append(f"{title} {best / len(text) * 1e6:.2f}")
        print(f"{name:22} {', '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
