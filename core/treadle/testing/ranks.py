"""Tensor parallelism inside one process: each rank is a thread, and nothing is set up.

It proves that a layer divides its work correctly; it says nothing about speed.
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


class _Meeting:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.brought[rank] = x.clone()
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()  # nobody may bring the next tensor before all have taken this one
        return found


class _Rank:
    memory_bytes = 0

    def __init__(self, meeting: _Meeting, rank: int, world_size: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, world_size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(dim=0)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=dim)

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        brought = self.meeting.exchange(self.rank, torch.tensor(list(values)))
        return [int(v) for v in torch.stack(brought).amin(dim=0)]


def run_on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Run ``work`` once for each rank, at the same time, and return what each rank returned.

    The first exception of any rank is raised here, and frees the ranks that wait for it.
    """
    meeting = _Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(_Rank(meeting, rank, size))
        except BaseException as error:
            # A broken barrier is the consequence of another rank's error.
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

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
