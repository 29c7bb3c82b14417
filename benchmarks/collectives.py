"""All-reduce of one tensor: NCCL against kernels over shared memory, by size.

::

    python benchmarks/collectives.py --ranks 2

One JSON line for each size: microseconds of one sum, the median over replays of a CUDA graph of 32
sums, on the slowest rank: of NCCL, of torch's kernel, of the plugin's. The last line has the largest
size up to which the plugin's (or torch's) is faster at every size: what ``weft.runner.one_shot.most``
should be on this machine.
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
from torch import Tensor

from weft.api.attention import KernelRequest
from weft.plugins import Host
from weft.runner.collective import TorchCollective
from weft.runner.device import describe
from weft.runner.one_shot import one_shot

SIZES = [1 << n for n in range(12, 24)]  # bytes
SUMS = 32
REPLAYS = 30


def captured(run: Callable[[Tensor], Any], x: Tensor) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            run(x)
    return graph


def microseconds(run: Callable[[Tensor], Any], x: Tensor) -> float:
    graph = captured(run, x)
    taken = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - began) / SUMS)
    slowest = torch.tensor([median(taken)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def work(rank: int, ranks: int, meeting: str) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    request = KernelRequest(describe(device), "bfloat16", {"ranks": ranks})
    group = TorchCollective(rank, ranks, device, FileStore(meeting, ranks), small=0)
    offers = {"torch": None, "kernel": Host().kernel("all_reduce", request)}
    made = {
        name: one_shot(group, device, dist.group.WORLD, SIZES[-1], offer)
        for name, offer in offers.items()
    }
    crossing, ahead = 0, True
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        nccl = microseconds(dist.all_reduce, x)
        ours = {name: microseconds(add, x) for name, add in made.items() if add is not None}
        ahead = ahead and bool(ours) and ours.get("kernel", ours["torch"]) < nccl
        crossing = size if ahead else crossing
        if rank == 0:
            taken = {"nccl": nccl, **ours}
            line = {"bytes": size, "ranks": ranks}
            print(json.dumps(line | {k: round(v, 2) for k, v in taken.items()}), flush=True)
    if rank == 0:
        print(json.dumps({"device": torch.cuda.get_device_name(), "limit_bytes": crossing}))
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    if torch.cuda.device_count() < ranks:
        parser.error(f"--ranks is {ranks}; there are {torch.cuda.device_count()} CUDA devices")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        workers = [spawn.Process(target=work, args=(r, ranks, meeting)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a rank failed; what it wrote is above")


if __name__ == "__main__":
    main()
