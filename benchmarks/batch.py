"""What a batch costs on top of its generation, and how its memory grows: a file of completions, answered
by ``LLM.generate`` and as a batch, each in a process of its own.

Prints one JSON line for each: seconds, output tokens per second, CPU seconds, and the resident memory of
the program, without its engine process, at a tenth and at the end of the lines.

    python benchmarks/batch.py demo:treadle-demo --lines 5000 --max-tokens 16
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

WORDS = ("page", "slot", "token", "prompt", "step", "cache", "model", "batch")
OPTIONS = {"cpu_threads": 1, "max_num_seqs": 64}


def prompts(count: int) -> list[str]:
    return [f"Number {i}: the {WORDS[i % len(WORDS)]} is" for i in range(count)]


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


def cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(sum(usage.ru_utime + usage.ru_stime for usage in usages), 1)


def measure_generate(model: str, lines: int, max_tokens: int) -> dict[str, Any]:
    from treadle import LLM, SamplingParams

    with LLM(model, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate(prompts(8), params, use_tqdm=False)
        start, cpu = time.perf_counter(), cpu_seconds()
        outputs = llm.generate(prompts(lines), params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return result("generate", seconds, tokens, cpu_seconds() - cpu, [rss_mib()])


def measure_batch(model: str, lines: int, max_tokens: int) -> dict[str, Any]:
    from treadle.config import from_options
    from treadle_server.batches.offline import answer_file

    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        with path.open("w") as file:
            for i, prompt in enumerate(prompts(lines)):
                body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
                request = {"custom_id": str(i), "method": "POST", "url": "/v1/completions"}
                file.write(json.dumps({**request, "body": {**body, "ignore_eos": True}}) + "\n")
        sizes: list[float] = []
        marks = [lines // 10, lines // 2, lines]
        start = 0.0

        def on_progress(counts: Any) -> None:
            nonlocal start
            done = counts.completed + counts.failed
            start = start or (time.perf_counter() if done else 0.0)  # the engine has started
            if marks and done >= marks[0]:
                marks.pop(0)
                sizes.append(rss_mib())

        config = from_options(model=model, **OPTIONS)
        counts = answer_file(config, path, output, on_progress)
        seconds = time.perf_counter() - start
        if counts.completed != lines:
            raise RuntimeError(f"{counts.failed} lines failed")
    return result("batch", seconds, lines * max_tokens, cpu_seconds(), sizes)


def result(name: str, seconds: float, tokens: int, cpu: float, sizes: list[float]) -> Any:
    rate = round(tokens / seconds, 1)
    return {"name": name, "seconds": seconds, "tok/s": rate, "cpu_s": cpu, "rss_mib": sizes}


def in_process(work: Any, *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo:treadle-demo")
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    for work in (measure_generate, measure_batch):
        print(
            json.dumps(in_process(work, arguments.model, arguments.lines, arguments.max_tokens)),
            flush=True,
        )


if __name__ == "__main__":
    main()
