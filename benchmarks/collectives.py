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
from treadle.api.models import ModelContext
from treadle.layers import device_info
from treadle.layers.fusion import apply_fusions
from treadle.plugins import PluginManager
from treadle_layers_kit import LMHead, RMSNorm
from treadle_worker_kit.communicator import TorchCommunicator, choose_communicator

SIZES = [1 << n for n in range(12, 27)]  # bytes
ROWS = (1, 8, 32, 64, 128, 226, 512, 1024, 4096, 8192)
GATHERED = (1, 8, 32, 96, 226)
WIDTH, VOCABULARY = 4096, 151936
MOST, LEAST = 32, 4  # calls of a graph
TOTAL = 1 << 26  # bytes that those of a graph move, if they are more than the least
REPLAYS = 20


def captured(run: Callable[[Tensor], Any], x: Tensor, calls: int) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run(x)
    return graph


def microseconds(run: Callable[[Tensor], Any], x: Tensor) -> float:
    calls = max(LEAST, min(MOST, TOTAL // x.nbytes))
    graph = captured(run, x, calls)
    taken = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - began) / calls)
    slowest = torch.tensor([median(taken)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(float(slowest), 2)


def say(tp_group: Communicator, **line: Any) -> None:
    if tp_group.rank == 0:
        print(json.dumps({"ranks": tp_group.world_size} | line), flush=True)


def sums(base: Communicator, device: torch.device) -> None:
    made = {
        name: create(base, device, triton=name == "kernel").custom for name in ("torch", "kernel")
    }
    crossing, ahead = 0, True
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        taken = {"nccl": microseconds(dist.all_reduce, x)}
        for name, add in made.items():
            if add is not None and add.supports(x):
                taken[name] = microseconds(add, x)
        ours = taken.get("kernel", taken.get("torch"))
        ahead = ahead and ours is not None and ours < taken["nccl"]
        crossing = size if ahead else crossing
        say(base, op="all_reduce", bytes=size, **taken)
    say(base, device=torch.cuda.get_device_name(), limit_bytes=crossing)


def layers(base: Communicator, tp_group: Communicator, device: torch.device) -> None:
    """Sums with norms, and logits side by side."""
    kind = torch.bfloat16
    context = ModelContext(None, kind, device, tp_group, None, lambda request, spec: NotImplemented)
    with device:
        norm, head = RMSNorm(context, WIDTH, 1e-6), LMHead(context, "head", 64, VOCABULARY)
    norm.tp_group = tp_group
    model = nn.ModuleList([norm, head])
    served = apply_fusions(model, PluginManager(), device_info(device), "bfloat16")
    say(tp_group, served=served.backends)
    gather_op = head.gather_op

    def by_nccl(x: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(x)
        return norm.add_op(x, x, norm.weight, norm.eps, norm.offset)

    def by_norm(x: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x, x)

    for rows in ROWS:
        x = torch.zeros(rows, WIDTH, dtype=kind, device=device)
        taken = {"nccl": microseconds(by_nccl, x), "norm": microseconds(by_norm, x)}
        say(tp_group, op="all_reduce_add_rms_norm", rows=rows, width=WIDTH, **taken)
    for rows in GATHERED:
        x = torch.zeros(rows, head.out_features, dtype=kind, device=device)
        taken = {"nccl": microseconds(base.all_gather, x)}
        if gather_op is not None:
            taken["kernel"] = microseconds(gather_op, x)
        say(tp_group, op="all_gather", rows=rows, width=head.out_features, **taken)


def work(rank: int, ranks: int, meeting: str) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    base = TorchCommunicator(rank, ranks, device, FileStore(meeting, ranks))
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
