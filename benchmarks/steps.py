"""What a step takes, and where its time goes: kernels, gaps between them, the host.

::

    python benchmarks/steps.py benchmarks/shapes/qwen3-0.6b --workload bs1 dec256 [--anatomy]

The workloads are those of docs/how/benchmarks.md, put to the engine's loop in this process: no text, no
sockets. ``passes`` times each; the best is printed, the first is a warm-up. ``--anatomy`` (CUDA) looks
at a window of steps in the middle of a pass instead: milliseconds of a step, how many of them a kernel
was running, the gaps by length, and the kernels by the time that they ran alone or first. Profiling
costs a few per cent; kernels that start early seem long in other tables, for they include their wait.

``--schema`` needs a tokenizer in the folder, and should allow more tokens than the workload asks for.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from typing import Any

import torch

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.config import from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.workloads import Workload, clip_to_vocab, workload

NAMES = ("bs1", "dec32", "dec256", "prefill", "mixed")
LENGTHS = (1, 2, 5, 20, 100)  # microseconds of gaps


def start(options: argparse.Namespace) -> EngineCore:
    config = from_options(
        model=options.shape,
        load_format="dummy",
        device=options.device,
        max_model_len=4096,
        enable_prefix_caching=False,
        max_step_ms=0,  # as LLM has it
        **options.set,
    )
    return EngineCore(config, PluginManager(config.plugins))


def add(core: EngineCore, batch: Workload, label: str, schema: str | None = None) -> None:
    for i, (prompt, count) in enumerate(zip(batch.prompts, batch.outputs, strict=True)):
        params = SamplingParams(
            temperature=0.6,
            max_tokens=count,
            ignore_eos=True,
            structured_outputs=StructuredOutputsParams(json=schema) if schema else None,
        )
        core.add_request(EngineRequest(f"{batch.name}-{label}-{i}", prompt, params, float(i)))


def steps(core: EngineCore, limit: int | None = None) -> int:
    """Run until the work is done, or ``limit`` steps with an output; returns how many had one."""
    num_steps = 0
    while core.has_work and num_steps != limit:
        outputs = core.step()  # without one while a grammar is compiled
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        num_steps += bool(outputs)
    return num_steps


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def throughput(
    core: EngineCore, batch: Workload, passes: int, schema: str | None
) -> dict[str, Any]:
    walls, num_steps = [], 0
    for pass_idx in range(passes + 1):
        add(core, batch, str(pass_idx), schema)
        wait()
        start_time = time.perf_counter()
        num_steps = steps(core)
        wait()
        walls.append(time.perf_counter() - start_time)
    best_s = min(walls[1:])
    tokens = batch.prompt_tokens if batch.counts == "prompt" else batch.output_tokens
    return {
        "workload": batch.name + (" with a schema" if schema else ""),
        "tokens_per_second": round(tokens / best_s, 1),
        "seconds": [round(wall, 4) for wall in walls],
        "steps": num_steps,
        "ms_per_step": round(1e3 * best_s / num_steps, 3),
    }


def anatomy(core: EngineCore, batch: Workload, schema: str | None) -> None:
    from torch.profiler import ProfilerActivity, profile

    skip, window = {"prefill": (0, 5), "mixed": (150, 20)}.get(batch.name, (40, 20))
    add(core, batch, "anatomy", schema)
    steps(core, skip)
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        num_steps = steps(core, window)
        wait()
    steps(core)
    cuda = torch._C._autograd.DeviceType.CUDA
    events = [
        event for event in prof.profiler.kineto_results.events() if event.device_type() == cuda
    ]
    show(
        batch.name,
        sorted((event.start_ns(), event.duration_ns(), event.name()) for event in events),
        num_steps,
    )


def show(name: str, events: list[tuple[int, int, str]], num_steps: int) -> None:
    """Print the anatomy of ``num_steps`` steps; events are (start, duration, name) in nanoseconds."""
    end = events[0][0]
    gaps: dict[str, list[float]] = collections.defaultdict(list)
    exclusive: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for begin, duration, kernel in events:
        gap = (begin - end) / 1e3
        if gap > 0:
            length = next((f"< {n}" for n in LENGTHS if gap < n), f"> {LENGTHS[-1]}")
            gaps[length].append(gap)
        exclusive[kernel] += max(0, begin + duration - max(begin, end))
        count[kernel] += 1
        end = max(end, begin + duration)
    span = (end - events[0][0]) / 1e6
    idle = sum(map(sum, gaps.values())) / 1e3
    print(
        f"{name}: {span / num_steps:.3f} ms a step, {(span - idle) / num_steps:.3f} ms with a kernel"
    )
    for length, lengths in sorted(gaps.items()):
        print(
            f"  gaps {length:>5} us: {len(lengths) / num_steps:7.1f}, {sum(lengths) / num_steps:7.1f} us"
        )
    for kernel, spent in exclusive.most_common(16):
        print(
            f"  {spent / num_steps / 1e3:9.1f} us in {count[kernel] / num_steps:6.1f} of {kernel[:76]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help="a model folder; its config.json is enough")
    parser.add_argument("--workload", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--num-iters", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", type=json.loads, default={}, help="further options, as JSON")
    parser.add_argument("--schema", help="time everything with this JSON schema, too")
    parser.add_argument("--anatomy", action="store_true")
    options = parser.parse_args()
    core = start(options)
    print("\n".join(core.info.report))
    for name in options.workload:
        batch = clip_to_vocab(workload(name, BenchConfig()), core.info.vocab_size)
        for schema in (None, options.schema) if options.schema else (None,):
            if options.anatomy:
                anatomy(core, batch, schema)
            else:
                result = throughput(core, batch, options.num_iters, schema)
                print(json.dumps(result), flush=True)
    core.close()


if __name__ == "__main__":
    main()
