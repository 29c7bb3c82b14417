"""Tensor parallelism inside one process: each rank is a thread, without torch.distributed.

It checks that a layer divides its work correctly; its speed means nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from treadle.api.communicators import Communicator

__all__ = ("run_on_ranks",)

T = TypeVar("T")
TIMEOUT = 60.0


class _Rendezvous:
    """The point at which the ranks of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.tensors: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.tensors[rank] = x.clone()
        self.barrier.wait()
        tensors = list(self.tensors)
        self.barrier.wait()  # the next tensor must not arrive before all ranks have read this one
        return tensors


class _Rank:
    memory_bytes = 0

    def __init__(self, rendezvous: _Rendezvous, rank: int, world_size: int) -> None:
        self.rendezvous, self.rank, self.world_size = rendezvous, rank, world_size
        self.is_dry_run = False

    def set_dry_run(self, enabled: bool) -> None:
        self.is_dry_run = enabled

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.is_dry_run:
            return x
        return torch.stack(self.rendezvous.exchange(self.rank, x)).sum(dim=0)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if self.is_dry_run:
            return torch.cat([x] * self.world_size, dim=dim)
        return torch.cat(self.rendezvous.exchange(self.rank, x), dim=dim)

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        tensors = self.rendezvous.exchange(self.rank, torch.tensor(list(values)))
        return [int(v) for v in torch.stack(tensors).amin(dim=0)]


def run_on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Run ``work`` once for each rank, at the same time, and return what each rank returned.

    The first exception of any rank is raised here, and wakes the ranks that wait for it.
    """
    rendezvous = _Rendezvous(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(_Rank(rendezvous, rank, size))
        except BaseException as error:
            # A broken barrier is the consequence of another rank's error.
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            rendezvous.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if len(results) < size:
        raise RuntimeError(f"the ranks did not meet within {TIMEOUT} s")
    return [results[rank] for rank in range(size)]
