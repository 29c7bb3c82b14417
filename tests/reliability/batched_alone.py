"""Is what a request gets in a full batch what it gets alone? Tokens and log probabilities, in float32 on the CPU.

python tests/reliability/batched_alone.py --tokens 1e6 --seed 1

Each request runs alone first, in an engine without a prefix cache and with pages for everything. Then all
of them run together in engines with few pages, small chunks, a prefix cache and every mix of these,
as many times as it takes to compare ``--tokens`` tokens. A request is one of greedy and seeded, with or without
penalties, a grammar, stop strings, allowed tokens and a shared prefix.

Sums of float32 depend on the shape of a product, so a log probability may differ by ``TOLERANCE``. A token
may differ only where that explains it: at a position at which another token was as good, within the
tolerance. Such positions are counted as ties; the tokens that follow one are not compared. Prints what
differs, and one JSON line for each engine; the status is 1 if anything differed that is no tie.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from treadle import LLM, SamplingParams
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.outputs import CompletionOutput

__all__ = ("Comparison", "Engine", "compare", "engines", "requests")

TOLERANCE = 2e-4
"""Of a log probability."""
MAX_MODEL_LEN = 256

Request = tuple[list[int], SamplingParams]


@dataclasses.dataclass(frozen=True)
class Engine:
    """Options of an engine that shares its pages and steps among many requests."""

    enable_prefix_caching: bool
    chunked_prefill_size: int | None
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def open(self) -> LLM:
        return open_engine(**dataclasses.asdict(self))


ALONE = Engine(
    enable_prefix_caching=False,
    chunked_prefill_size=None,
    num_pages=64,
    max_num_seqs=1,
    max_num_batched_tokens=2048,
)


def open_engine(**options: Any) -> LLM:
    return LLM(
        model="demo:treadle-demo",
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        page_size=16,
        max_model_len=MAX_MODEL_LEN,
        **options,
    )


def engines() -> Iterator[Engine]:
    """Every mix, the ones with the fewest pages first."""
    for pages, prefix, chunk, seqs in itertools.product(
        (24, 64, 1024), (True, False), (16, 64, None), (4, 32, 128)
    ):
        yield Engine(prefix, chunk, pages, seqs, max(128, seqs))


def requests(count: int, seed: int, vocab: range) -> list[Request]:
    draw = random.Random(seed)
    prefixes = [[draw.choice(vocab) for _ in range(40)] for _ in range(4)]
    return [(prompt(draw, prefixes, vocab), params(draw, vocab)) for _ in range(count)]


def prompt(draw: random.Random, prefixes: Sequence[list[int]], vocab: range) -> list[int]:
    own = [draw.choice(vocab) for _ in range(draw.randint(1, 100))]
    return draw.choice(prefixes)[: draw.randint(1, 40)] + own if draw.random() < 0.5 else own


def params(draw: random.Random, vocab: range) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": draw.randint(1, 120), "logprobs": 2, "ignore_eos": True}
    if draw.random() < 0.5:
        values |= {"temperature": 0.0}
    else:
        values |= {"temperature": draw.choice((0.5, 1.0, 1.5)), "seed": draw.randrange(2**32)}
        values |= draw.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}))
    values |= draw.choice(
        (
            {},
            {},
            {"repetition_penalty": 1.3},
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
            {"stop": ["e", "\n"], "ignore_eos": False},
            {"min_tokens": 1, "ignore_eos": False},
            {"allowed_token_ids": draw.sample(vocab, 50)},
            {"logit_bias": {token: 2.0 for token in draw.sample(vocab, 5)}},
            {"structured_outputs": StructuredOutputsParams(regex="[a-z]{3,60}")},
            {"structured_outputs": StructuredOutputsParams(choice=["yes", "no", "perhaps so"])},
        )
    )
    if "structured_outputs" in values:
        values["ignore_eos"] = False
    return SamplingParams(**values)


def run(llm: LLM, batch: Sequence[Request]) -> list[CompletionOutput]:
    outputs = llm.generate(
        [prompt for prompt, _ in batch], [params for _, params in batch], use_tqdm=False
    )
    return [output.outputs[0] for output in outputs]


@dataclasses.dataclass
class Comparison:
    """Tokens compared, how many requests came to a tie, and what differed otherwise."""

    num_tokens: int = 0
    num_ties: int = 0
    max_difference: float = 0.0
    faults: list[str] = dataclasses.field(default_factory=list)


def compare(
    name: str, alone: CompletionOutput, batched: CompletionOutput, into: Comparison
) -> None:
    """Add one request to ``into``."""
    if alone.logprobs is None or batched.logprobs is None:
        into.faults.append(f"{name}: {alone.error or batched.error or 'no log probabilities'}")
        return
    for at, (token, other) in enumerate(itertools.zip_longest(alone.token_ids, batched.token_ids)):
        into.num_tokens += 1
        if token != other:
            if None not in (token, other) and is_tie(alone, batched, at):
                into.num_ties += 1
            else:
                into.faults.append(
                    f"{name}: token {at} is {other}, and {token} alone;"
                    f" {batched.logprobs[at : at + 1]}, {alone.logprobs[at : at + 1]} alone"
                )
            return
        expected = alone.logprobs[at][token].logprob
        difference = abs(batched.logprobs[at][token].logprob - expected)
        into.max_difference = max(into.max_difference, difference)
        if not difference <= TOLERANCE:
            into.faults.append(f"{name}: log probability {at} differs by {difference}")
            return
    if (alone.text, alone.finish_reason) != (batched.text, batched.finish_reason):
        into.faults.append(
            f"{name}: ends with {batched.finish_reason}, {alone.finish_reason} alone"
        )


def is_tie(alone: CompletionOutput, batched: CompletionOutput, at: int) -> bool:
    """Whether the tokens of both are as good as each other where they differ: known of greedy ones."""
    assert alone.logprobs is not None and batched.logprobs is not None
    here = alone.logprobs[at]
    token, other = alone.token_ids[at], batched.token_ids[at]
    return other in here and abs(here[token].logprob - here[other].logprob) <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=1e6)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    total = num_ties = num_faults = num_preemptions = 0
    for seed in itertools.count(options.seed):
        with ALONE.open() as llm:
            vocab = range(300, llm.info.vocab_size)
            batch = requests(options.requests, seed, vocab)
            alone = [run(llm, [request])[0] for request in batch]
        for engine in engines():
            start_time = time.perf_counter()
            found = Comparison()
            with engine.open() as llm:
                for i, output in enumerate(run(llm, batch)):
                    compare(f"seed {seed}, request {i} {batch[i][1]}", alone[i], output, found)
                preemptions = llm.stats.num_preemptions
                assert llm.stats.num_used_pages == 0
            total += found.num_tokens
            num_ties += found.num_ties
            num_faults += len(found.faults)
            num_preemptions += preemptions
            for fault in found.faults:
                print(fault, flush=True)
            row = dataclasses.asdict(engine) | dataclasses.asdict(found)
            row |= {"faults": len(found.faults), "preemptions": preemptions}
            row["seconds"] = round(time.perf_counter() - start_time, 1)
            print(json.dumps(row), flush=True)
            if total >= options.tokens:
                print(
                    f"{total:,} tokens, {num_preemptions:,} preemptions, {num_ties} ties,"
                    f" {num_faults} differences"
                )
                sys.exit(num_faults > 0)


if __name__ == "__main__":
    main()
