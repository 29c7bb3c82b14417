"""Tokens per second of SGLang, in the workloads of ``with_vllm.py`` beside this file.

::

    python benchmarks/gpu_peers/with_sglang.py FOLDER --workload guided32 guided256 [--backend llguidance]
    python benchmarks/gpu_peers/with_sglang.py benchmarks/shapes/qwen3-8b [--set '{"page_size": 16}']

It runs with the interpreter that SGLang is installed for, where treadle need not be, on random weights. The folder has
a ``config.json``, and for the guided workloads a tokenizer. Requests go through ``Engine.generate`` with token ids, all
in one call. The first pass of each workload is a warm-up, the best of the others counts.

SGLang ends a request whose grammar has ended, whatever ``ignore_eos`` says: guided rates count the tokens that came,
and ``short`` says how many rows of the best pass have fewer than were asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from with_vllm import GUIDED, NAMES, RECORD, ROWS, say, workload

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "context_length": 4096,
    "max_running_requests": 256,
    "cuda_graph_max_bs_decode": 256,
    "disable_prefill_cuda_graph": True,
    "disable_radix_cache": True,
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "disable_flashinfer_autotune": True,
    "random_seed": 0,
    "log_level": "warning",
}


class Pass(NamedTuple):
    """What came of one pass over a workload."""

    seconds: float
    tokens: int
    short: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(options: argparse.Namespace) -> None:
    import sglang

    is_guided = not GUIDED.keys().isdisjoint(options.workload)
    chosen = {
        **OPTIONS,
        "grammar_backend": options.backend if is_guided else "none",
        "skip_tokenizer_init": not is_guided,
        **options.set,
    }
    start = time.perf_counter()
    engine = sglang.Engine(model_path=str(options.shape), **chosen)
    say(
        sglang=sglang.__version__,
        attention=chosen["attention_backend"],
        start_seconds=time.perf_counter() - start,
    )

    def once(prompts: list[list[int]], outputs: list[int], schema: Any = None) -> Pass:
        params: list[dict[str, Any]] = [
            {"temperature": 0.6, "max_new_tokens": count, "ignore_eos": True} for count in outputs
        ]
        if schema is not None:
            params = [{**row, "json_schema": json.dumps(schema)} for row in params]
        start = time.perf_counter()
        done: Any = engine.generate(input_ids=prompts, sampling_params=params)
        elapsed = time.perf_counter() - start
        counts = [answer["meta_info"]["completion_tokens"] for answer in done]
        reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in done}
        short = sum(count < asked for count, asked in zip(counts, outputs, strict=True))
        if sum(counts) > sum(outputs) or (short and schema is None) or "abort" in reasons:
            raise RuntimeError(f"outputs are not as they were asked to be: {counts}, {reasons}")
        return Pass(elapsed, sum(counts), short)

    try:
        for name in options.workload:
            passes = range(options.num_iters + 1)
            if name in GUIDED:
                rows = GUIDED[name]
                work = [[100 + i] * 64 for i in range(rows)], [256] * rows
                turns = [(once(*work), once(*work, RECORD)) for _ in passes]
                free, guided = (
                    max(turn, key=lambda one: one.rate) for turn in zip(*turns[1:], strict=True)
                )
                say(
                    workload=name,
                    backend=chosen["grammar_backend"],
                    free=free.rate,
                    guided=guided.rate,
                    guided_tokens=guided.tokens,
                    short=guided.short,
                )
            else:
                prompts, outputs, tokens = workload(name)
                walls = [once(prompts, outputs).seconds for _ in passes]
                say(workload=name, tokens_per_second=tokens / min(walls[1:]))
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", type=Path, help="a model folder; its config.json is enough")
    parser.add_argument("--workload", nargs="+", choices=NAMES, default=(*ROWS, "mixed"))
    parser.add_argument("--backend", default="xgrammar", help="xgrammar or llguidance")
    parser.add_argument("--num-iters", type=int, default=2)
    parser.add_argument("--set", type=json.loads, default={}, help="options of Engine, as JSON")
    options = parser.parse_args()
    os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")  # the rest needs none
    run(options)


if __name__ == "__main__":
    main()
