"""How kernels and threads on a CPU pay: decoding, a prompt and many requests at once, with every setting.

::

    python benchmarks/cpu.py benchmarks/shapes/llama-14m [--rounds 3] [--threads 1 2] [--kernels torch native int8]

A setting is what computes (``torch``, the ``native`` kernels, those on weights in ``int8`` or ``int4``, or on a
checkpoint of AWQ's: ``awq``, and ``awq-torch``), a number of threads and, in torch, a way of waiting:
``asleep`` (``OMP_WAIT_POLICY=passive``), ``chosen`` (what treadle sets here, now), a number of turns that libgomp spins, or ``spinning`` (as long as
the runtime likes). Each runs in a process of its own, and settings take turns, so that a
machine that others use is unfair to all of them alike. Printed are medians over the rounds, ratios to the
first setting, and how many cores other processes used: with more than a tenth of one, compare
tokens for each CPU second, and only ratios.

With ``--llama-bench PROGRAM`` and GGUF files of the same shape (``benchmarks/gguf_shape.py`` writes one with random
weights, ``llama-quantize`` others), llama.cpp takes its turns, too. It decodes and reads prompts; it has no third workload.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WORKLOADS = {"decode": (1, 8, 64), "prefill": (1, 1024, 1), "offline": (16, 128, 64)}
"""Requests, tokens of each prompt, tokens of each answer."""
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAYS = ("asleep", "chosen", "spinning")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
KERNELS: Mapping[str, dict[str, Any]] = {
    "torch": {"disable_plugin": ["kernel_ops:native"]},
    "native": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "awq": {"hf_overrides": {"quantization_config": AWQ}},
    "awq-torch": {
        "hf_overrides": {"quantization_config": AWQ},
        "disable_plugin": ["kernel_ops:native"],
    },
}
Row = dict[str, float]


def environment(waiting: str) -> dict[str, str]:
    """The variables of a child that waits in this way."""
    variables = {name: value for name, value in os.environ.items() if name not in WAITING}
    match waiting:
        case "chosen":
            return variables
        case "asleep":
            return variables | {"OMP_WAIT_POLICY": "passive"}
        case "spinning":
            # With a policy treadle leaves the rest alone. This count is libgomp's without a policy.
            return variables | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300000"}
        case turns:
            return variables | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(int(turns))}


def busy_seconds() -> float:
    """CPU seconds of all processes since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = (
        int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(shape: str, kernels: str, threads: int, repeats: int) -> Row:
    """Run every workload in this process."""
    from treadle.config import from_options, set_library_environment

    set_library_environment()  # before torch
    from treadle.engine.core import EngineCore
    from treadle.plugins import PluginManager

    config = from_options(
        model=shape,
        load_format="dummy",
        device="cpu",
        cpu_threads=threads,
        max_model_len=2048,
        enable_prefix_caching=False,
        max_step_ms=0,  # as LLM has it
        **KERNELS[kernels],
    )
    core = EngineCore(config, PluginManager(config.plugins))
    row: Row = {}
    begin, others = time.perf_counter(), busy_seconds() - time.process_time()
    for name, (requests, prompt, answer) in WORKLOADS.items():
        tokens = requests * (prompt if name == "prefill" else answer)
        runs = [timed(core, requests, prompt, answer) for _ in range(repeats + 1)][1:]
        row[name] = tokens / statistics.median(wall for wall, _ in runs)
        row[f"{name} / CPU s"] = tokens / statistics.median(cpu for _, cpu in runs)
    others = busy_seconds() - time.process_time() - others
    row["others' cores"] = others / (time.perf_counter() - begin)
    status = Path("/proc/self/status").read_text()
    row["GB resident"] = int(status.partition("VmRSS:")[2].split()[0]) / 1e6
    core.close()
    return row


def timed(core: Any, requests: int, prompt: int, answer: int) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    from treadle.api.requests import EngineRequest
    from treadle.api.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    for i in range(requests):
        tokens = [(7 * position + i) % 8000 for position in range(prompt)]
        core.add_request(EngineRequest(f"{i}", tokens, params, 0.0))
    wall, cpu = time.perf_counter(), time.process_time()
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
    return time.perf_counter() - wall, time.process_time() - cpu


def rounds(options: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Yield the figures of each setting of each round."""
    for _ in range(options.rounds):
        for threads in options.threads:
            for kernels in options.kernels:
                # The native kernels have threads of their own, which wait in one way.
                waits = threads > 1 and "torch" in kernels
                for waiting in options.waiting if waits else ("chosen",):
                    command = [sys.executable, __file__, options.shape, "--child", str(threads)]
                    command += ["--repeats", str(options.repeats), "--kernels", kernels]
                    result = subprocess.run(
                        command,
                        env=environment(waiting),
                        stdout=subprocess.PIPE,
                        check=True,
                        text=True,
                    )
                    row = json.loads(result.stdout.splitlines()[-1])
                    name = f"{kernels}, {threads} thread{'s' * (threads > 1)}"
                    yield name + f", {waiting}" * waits, row
            for file in options.gguf:
                row = run_llama_bench(options.llama_bench, file, threads, options.repeats)
                yield f"llama.cpp {Path(file).stem}, {threads} thread{'s' * (threads > 1)}", row


def run_llama_bench(program: str, file: str, threads: int, repeats: int) -> Row:
    """Return what llama.cpp makes of the workloads that its own benchmark has."""
    (_, _, answer), (_, prompt, _) = WORKLOADS["decode"], WORKLOADS["prefill"]
    counts = ["-t", threads, "-p", prompt, "-n", answer, "-r", repeats]
    command = [program, "-m", file, *map(str, counts), "-o", "json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    speeds = {bool(test["n_gen"]): float(test["avg_ts"]) for test in json.loads(result.stdout)}
    return {"decode": speeds[True], "prefill": speeds[False]}


def show(rows: Mapping[str, list[Row]]) -> None:
    """Print medians as a table, with the ratio to the first setting."""
    medians = {
        setting: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for setting, found in rows.items()
    }
    names = list(next(iter(medians.values())))
    first = next(iter(medians.values()))
    print("| tokens / s |", *(f"{name} |" for name in names))
    print("|---|" + "---|" * len(names))
    for setting, row in medians.items():
        cells = (
            "– |"
            if name not in row
            else f"{row[name]:.2f} |"
            if name in ("others' cores", "GB resident")
            else f"{row[name]:,.0f} ({row[name] / first[name]:.2f}) |"
            for name in names
        )
        print(f"| {setting} |", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help="a model folder; its config.json is enough")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=["torch", "native"])
    parser.add_argument("--waiting", nargs="+", default=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="runs of a workload in a process")
    parser.add_argument("--llama-bench", default="llama-bench", help="the program of llama.cpp")
    parser.add_argument("--gguf", nargs="*", default=[], help="files that it runs")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for waiting in options.waiting:
        if waiting not in WAYS and not waiting.isdecimal():
            parser.error(f"--waiting {waiting}: not {', '.join(WAYS)} or a number of turns")
    if options.child is not None:
        print(
            json.dumps(measure(options.shape, options.kernels[0], options.child, options.repeats))
        )
        return
    rows: dict[str, list[Row]] = {}
    for setting, row in rounds(options):
        rows.setdefault(setting, []).append(row)
    show(rows)


if __name__ == "__main__":
    main()
