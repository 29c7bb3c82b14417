"""The sampler, stage by stage: what does a step cost, and how much of it is the host's?

::

    PYTHONPATH=core python benchmarks/sampler.py [--device cuda] [--rows 1 32 256] [--flat]

``call`` is the best time of ``Sampler.sample``, waiting for its result (the best, because other
work on the machine only adds); ``host`` is the part until
it returns; ``graph`` is a replay of ``Sampler.sample_graphable`` (CUDA, and stages that allow it);
``ops`` counts tensor operations that run a kernel. ``x`` is relative to greedy at the same rows, and
``GB/s`` is what reading the logits once in the time of ``graph``, or of ``call``, would come to.

Probabilities follow Zipf's law with exponent 2 in an order of their own per row, as peaked as
those of a language model; ``--flat`` takes a bell curve instead, of which a nucleus is long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.sampling.logprobs import prompt_logprobs
from treadle.sampling.masks import bitmask_words
from treadle.sampling.sampler import Sampler

PROMPT = 500
STAGES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_k 20": {"top_k": 20},
    "top_k 1000": {"top_k": 1000},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "bias and min_tokens": {
        "logit_bias": {5: 1.0, 9: -3.0},
        "min_tokens": 4000,
        "max_tokens": 4000,
    },
    "bad words": {"bad": [[3], [1, 2], [4, 5, 6]]},
    "allowed ids": {"allowed_token_ids": list(range(0, 30_000, 3))},
    "logprobs 5": {"logprobs": 5},
}
VIEWS = (
    "view",
    "slice",
    "select",
    "as_strided",
    "expand",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "split",
    "unbind",
)


class Count(TorchDispatchMode):
    """Counts operations that are more than another view of the same memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.ops += not any(name == view or name == f"_unsafe_{view}" for view in VIEWS)
        return func(*args, **(kwargs or {}))


def best_of(
    call: Callable[[], Any], synchronize: Callable[[], None], seconds: float = 0.3
) -> tuple[float, float]:
    """Microseconds until ``call`` is done, and until it returns."""
    for _ in range(3):
        call()
    synchronize()
    times: list[float] = []
    host_times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        host_times.append(time.perf_counter() - start)
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6, min(host_times) * 1e6


def make_logits(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device, is_flat: bool
) -> Tensor:
    if is_flat:
        return (torch.randn(rows, vocab, device=device) * 2).to(dtype)
    zipf = -2.0 * torch.arange(1, vocab + 1, device=device).float().log()
    return torch.stack([zipf[torch.randperm(vocab, device=device)] for _ in range(rows)]).to(dtype)


def create_sampler(rows: int, vocab: int, device: torch.device, params: dict[str, Any]) -> Sampler:
    params = dict(params)
    bad_words = params.pop("bad", [])
    sampler = Sampler(rows + 1, vocab, device)
    tokens = torch.randint(0, vocab, (rows, PROMPT)).tolist()
    settings = SamplingParams(**params)
    sampler.add_sequences(
        [NewSequenceData(s, settings, PROMPT, tokens[s], s, [0, 1], bad_words) for s in range(rows)]
    )
    return sampler


def captured(
    sampler: Sampler, logits: Tensor, slots: Tensor, rows: Sequence[int]
) -> Callable[[], None] | None:
    features = sampler.features(rows)
    if features is None or logits.device.type != "cuda":
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sampler.sample_graphable(logits, slots, slots, features)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample_graphable(logits, slots, slots, features)
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--flat", action="store_true")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    print(
        f"torch {torch.__version__}, {name}, vocabulary {options.vocab}, {options.dtype} logits; µs"
    )
    for count in options.rows:
        logits = make_logits(count, options.vocab, dtype, device, options.flat)
        slots, rows = torch.arange(count, device=device), list(range(count))
        positions = slots + PROMPT
        table(options.vocab, logits, slots, positions, rows, synchronize)


def table(
    vocab: int,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: list[int],
    synchronize: Callable[[], None],
) -> None:
    base = 0.0
    print(
        f"\n{f'{len(rows)} rows':24}{'call':>10}{'host':>10}{'graph':>10}{'ops':>6}{'x':>8}{'GB/s':>8}"
    )

    def line(stage: str, call: Callable[[], Any], replay: Callable[[], None] | None = None) -> None:
        nonlocal base
        total_us, host_us = best_of(call, synchronize)
        graph = best_of(replay, synchronize)[0] if replay else float("nan")
        with Count() as counter:
            call()
        best_us = graph if replay else total_us
        base = base or best_us
        times = f"{total_us:10.1f}{host_us:10.1f}{graph:10.1f}"
        print(
            f"{stage:24}{times}{counter.ops:6d}{best_us / base:8.2f}{logits.nbytes / best_us / 1e3:8.0f}"
        )

    device = logits.device
    for stage, params in STAGES.items():
        sampler = create_sampler(len(rows), vocab, device, params)
        replay = captured(sampler, logits, slots, rows)
        line(stage, bind(sampler, logits, slots, positions, rows, {}), replay)
    sampler = create_sampler(len(rows), vocab, device, {})
    mask = torch.full((len(rows), bitmask_words(vocab)), -1, dtype=torch.int32, device=device)
    line("bitmask", bind(sampler, logits, slots, positions, rows, {"bitmask": mask}))
    line("prompt_logprobs 5", lambda: prompt_logprobs(logits, slots, 5))
    sampler.add_sequences([NewSequenceData(0, SamplingParams(top_p=0.95), 1, [0], 0, [], [])])
    line("one row of top_p 0.95", bind(sampler, logits, slots, positions, rows, {}))


def bind(
    sampler: Sampler,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: list[int],
    options: dict[str, Any],
) -> Callable[[], Any]:
    return lambda: sampler.sample(logits, slots, positions, rows, **options)


if __name__ == "__main__":
    main()
