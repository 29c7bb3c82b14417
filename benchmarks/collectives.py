"""What ranks of one host send each other: NCCL against kernels over shared memory, by size.

::

    python benchmarks/collectives.py --ranks 2

One JSON line for each operation and size: microseconds of one, the median over replays of a CUDA graph of
several, on the slowest rank. ``all_reduce`` is of bfloat16, by NCCL, by torch's kernel (up to the size for
which it is used) and by the plugin's; the next line has the largest size up to which the plugin's (or
torch's) is faster at every size: what ``max_custom_bytes`` of the plugin should be on this machine.
``all_reduce_add_rms_norm`` is that of rows of 4096 with residual and norm, as a model's layer does it, and by NCCL
and the kernel of the norm; ``all_gather`` that of a vocabulary's logits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from treadle_communicator_symmetric.communicator import create

from treadle.api.communicators import Communicator
from treadle.api.devices import device_info
from treadle.api.models import ModelContext
from treadle.plugins import PluginManager
from treadle_layers_kit import LMHead, RMSNorm
from treadle_worker_kit.communicator import TorchCommunicator, choose_communicator
from treadle_worker_kit.fusion import apply_fusions, kernel_finder

SIZES = [1 << n for n in range(12, 27)]  # bytes
ROWS = (1, 8, 32, 64, 128, 226, 512, 1024, 4096, 8192)
GATHERED = (1, 8, 32, 96, 226)
WIDTH, VOCABULARY = 4096, 151936
MAX_CALLS, MIN_CALLS = 32, 4  # calls of a graph
TOTAL = 1 << 26  # bytes that those of a graph move, if they are more than the least
REPLAYS = 20


def captured(call: Callable[[Tensor], Any], x: Tensor, calls: int) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call(x)
    return graph


def microseconds(call: Callable[[Tensor], Any], x: Tensor) -> float:
    calls = max(MIN_CALLS, min(MAX_CALLS, TOTAL // x.nbytes))
    graph = captured(call, x, calls)
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    max_time = torch.tensor([median(times)], device="cuda")
    dist.all_reduce(max_time, op=dist.ReduceOp.MAX)
    return round(float(max_time), 2)


def say(tp_group: Communicator, **line: Any) -> None:
    if tp_group.rank == 0:
        print(json.dumps({"ranks": tp_group.world_size} | line), flush=True)


def sums(base: Communicator, device: torch.device) -> None:
    all_reduces = {
        name: create(base, device, triton=name == "kernel").custom for name in ("torch", "kernel")
    }
    crossover, is_faster = 0, True
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        times = {"nccl": microseconds(dist.all_reduce, x)}
        for name, add in all_reduces.items():
            if add is not None and add.supports(x):
                times[name] = microseconds(add, x)
        kernel_time = times.get("kernel", times.get("torch"))
        is_faster = is_faster and kernel_time is not None and kernel_time < times["nccl"]
        crossover = size if is_faster else crossover
        say(base, op="all_reduce", bytes=size, **times)
    say(base, device=torch.cuda.get_device_name(), limit_bytes=crossover)


def layers(base: Communicator, tp_group: Communicator, device: torch.device) -> None:
    """Sums with norms, and logits side by side."""
    dtype = torch.bfloat16
    context = ModelContext(
        None, dtype, device, tp_group, None, lambda request, spec: NotImplemented
    )
    with device:
        norm, head = RMSNorm(context, WIDTH, 1e-6), LMHead(context, "head", 64, VOCABULARY)
    norm.tp_group = tp_group
    model = nn.ModuleList([norm, head])
    report = apply_fusions(model, kernel_finder(PluginManager()), device_info(device), "bfloat16")
    say(tp_group, served=report.backends)
    gather_op = head.gather_op

    def by_nccl(x: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(x)
        return norm.add_op(x, x, norm.weight, norm.eps, norm.offset)

    def by_norm(x: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x, x)

    for rows in ROWS:
        x = torch.zeros(rows, WIDTH, dtype=dtype, device=device)
        times = {"nccl": microseconds(by_nccl, x), "norm": microseconds(by_norm, x)}
        say(tp_group, op="all_reduce_add_rms_norm", rows=rows, width=WIDTH, **times)
    for rows in GATHERED:
        x = torch.zeros(rows, head.out_features, dtype=dtype, device=device)
        times = {"nccl": microseconds(base.all_gather, x)}
        if gather_op is not None:
            times["kernel"] = microseconds(gather_op, x)
        say(tp_group, op="all_gather", rows=rows, width=head.out_features, **times)


def work(rank: int, ranks: int, store_path: str) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    base = TorchCommunicator(rank, ranks, device, FileStore(store_path, ranks))
    with torch.inference_mode():
        sums(base, device)
        layers(base, choose_communicator(PluginManager(), base, device), device)
    base.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    if torch.cuda.device_count() < ranks:
        parser.error(f"--ranks is {ranks}; there are {torch.cuda.device_count()} CUDA devices")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store_path = str(Path(folder) / "meeting")
        workers = [spawn.Process(target=work, args=(r, ranks, store_path)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a rank failed; what it wrote is above")


if __name__ == "__main__":
    main()
