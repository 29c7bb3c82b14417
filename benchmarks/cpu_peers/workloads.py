"""What ``benchmarks/cpu.py`` measures, whoever computes it. It runs in other engines' interpreters: no imports of ours."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WORKLOADS = {"decode": (1, 8, 64), "prefill": (1, 1024, 1), "offline": (16, 128, 64)}
"""Requests, tokens of each prompt, tokens of each answer."""
MAX_LEN = 2048
"""Tokens of a request, at most."""
Row = dict[str, float]
Generate = Callable[[Sequence[Sequence[int]], int], None]
"""Answers prompts, as ids, with so many tokens each, all at once."""


def busy_seconds() -> float:
    """CPU seconds of all processes since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = (
        int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(generate: Generate, repeats: int) -> Row:
    """Run every workload in this process, ``repeats`` times after a warm-up; tokens per second and memory."""
    row: Row = {}
    begin, others = time.perf_counter(), busy_seconds() - time.process_time()
    for name, (requests, prompt, answer) in WORKLOADS.items():
        tokens = requests * (prompt if name == "prefill" else answer)
        runs = [_timed(generate, requests, prompt, answer) for _ in range(repeats + 1)][1:]
        row[name] = tokens / statistics.median(wall for wall, _ in runs)
        row[f"{name} / CPU s"] = tokens / statistics.median(cpu for _, cpu in runs)
    others = busy_seconds() - time.process_time() - others
    row["others' cores"] = others / (time.perf_counter() - begin)
    status = Path("/proc/self/status").read_text()
    row["GB resident"] = int(status.partition("VmRSS:")[2].split()[0]) / 1e6
    return row


def _timed(generate: Generate, requests: int, prompt: int, answer: int) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    prompts = [[(7 * position + i) % 8000 for position in range(prompt)] for i in range(requests)]
    wall, cpu = time.perf_counter(), time.process_time()
    generate(prompts, answer)
    return time.perf_counter() - wall, time.process_time() - cpu
