"""Other engines that take their turns in ``benchmarks/cpu.py``."""

from __future__ import annotations

import json
import os
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from cpu_peers.workloads import WORKLOADS, Row, busy_seconds

__all__ = ("turns",)

OURS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONPATH")
"""Variables that are for our interpreter, not for theirs."""


def turns(options: Namespace, threads: int) -> Iterator[tuple[str, Row]]:
    """Yield a name and the figures of each peer that the options of ``cpu.py`` ask for."""
    for file in options.gguf:
        yield f"llama.cpp {Path(file).stem}", llama_bench(options, file, threads)
    if options.vllm_python:
        yield "vLLM", ask(options, "vllm", options.vllm_python, options.shape, threads)
    if options.openvino:
        yield "OpenVINO", ask(options, "openvino", *options.openvino, threads)


def ask(options: Namespace, peer: str, python: str, model: str, threads: int) -> Row:
    """Run a peer in its interpreter."""
    command = [
        python,
        str(Path(__file__).with_name("engines.py")),
        peer,
        model,
        str(threads),
        str(options.repeats),
    ]
    row: Row = json.loads(output_of(command).splitlines()[-1])
    return row


def llama_bench(options: Namespace, file: str, threads: int) -> Row:
    """Return what llama.cpp makes of the workloads that its own benchmark has."""
    (_, _, answer), (_, prompt, _) = WORKLOADS["decode"], WORKLOADS["prefill"]
    counts = ["-t", threads, "-p", prompt, "-n", answer, "-r", options.repeats]
    command = [options.llama_bench, "-m", file, *map(str, counts), "-o", "json"]
    begin, others = time.perf_counter(), busy_seconds() - children_seconds()
    tests = json.loads(output_of(command))
    others = busy_seconds() - children_seconds() - others
    speeds = {bool(test["n_gen"]): float(test["avg_ts"]) for test in tests}
    row = {"decode": speeds[True], "prefill": speeds[False]}
    return row | {"others' cores": others / (time.perf_counter() - begin)}


def children_seconds() -> float:
    """CPU seconds of the processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


def output_of(command: list[str]) -> str:
    """Run a peer without what our interpreter has in its environment; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return result.stdout
