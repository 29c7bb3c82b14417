"""The requests of benchmarks.

The five named workloads are those of docs/how/benchmarks.md, to the last random number: prompts are
token ids drawn from ``random.Random(0)``, whose order of draws is part of the definition.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from treadle_cli.bench.config import BenchConfig

__all__ = ("Workload", "clip_to_vocab", "workload")

LARGEST_ID = 10000


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as ids, the number of tokens to generate for each, and what the result counts."""

    name: str
    prompts: list[list[int]]
    outputs: list[int]
    counts: Literal["output", "prompt"] = "output"

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(p) + n for p, n in zip(self.prompts, self.outputs, strict=True))


def mixed() -> Workload:
    """256 requests with lengths uniform in 100 … 1024."""
    draw = random.Random(0)
    prompts = [_ids(draw, draw.randint(100, 1024)) for _ in range(256)]
    return Workload("mixed", prompts, [draw.randint(100, 1024) for _ in range(256)])


def uniform(
    name: str,
    requests: int,
    prompt: int,
    output: int,
    counts: Literal["output", "prompt"] = "output",
) -> Workload:
    """Requests of one size."""
    draw = random.Random(0)
    return Workload(
        name, [_ids(draw, prompt) for _ in range(requests)], [output] * requests, counts
    )


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(0, LARGEST_ID) for _ in range(count)]


NAMED_WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "mixed": mixed,
    "bs1": lambda: uniform("bs1", 1, 128, 256),
    "prefill": lambda: uniform("prefill", 16, 2048, 1, "prompt"),
    "dec32": lambda: uniform("dec32", 32, 64, 256),
    "dec256": lambda: uniform("dec256", 256, 64, 256),
}


def workload(name: str, config: BenchConfig) -> Workload:
    """A named workload, or the one that ``config`` describes."""
    if name == "custom":
        return uniform("custom", config.num_prompts, config.input_len, config.output_len)
    return NAMED_WORKLOADS[name]()


def clip_to_vocab(source: Workload, vocab_size: int) -> Workload:
    """The same workload with ids that a small vocabulary has."""
    if vocab_size > LARGEST_ID:
        return source
    prompts = [[token % vocab_size for token in prompt] for prompt in source.prompts]
    return Workload(source.name, prompts, source.outputs, source.counts)
