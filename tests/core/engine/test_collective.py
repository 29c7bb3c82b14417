"""The ranks of one model: what is summed by one kernel, and that nothing breaks without it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.api.attention import KernelRequest
from weft.config import forbid_multicast
from weft.layers import NullCollective
from weft.plugins import Host
from weft.runner import one_shot as module
from weft.runner.collective import TorchCollective
from weft.runner.device import describe
from weft.runner.one_shot import PIECE, OneShot, most, one_shot
from weft.testing.ranks import on_ranks


class Two(NullCollective):
    """This rank and one that never has an obstacle."""

    size = 2


def test_what_fits() -> None:
    limit = 1 << 18
    small = OneShot(torch.clone, limit, "none")
    full = torch.empty(4, limit // 8, dtype=torch.bfloat16)
    assert small.fits(full) and small.fits(full[1:3]) and small.fits(full.float()[:2])
    for wrong in (
        torch.empty(limit // 2 + 8, dtype=torch.bfloat16),  # too large
        full.half(),  # no such kernel
        full[:, :8],  # not contiguous
        full.view(-1)[:7],  # not a multiple of 16 bytes
        full.view(-1)[1:9],  # not aligned
        full[:0],
    ):
        assert not small.fits(wrong), wrong.shape


def test_a_cpu_has_nccls_place_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.runner"):
        assert one_shot(Two(), torch.device("cpu"), None, PIECE) is None
    assert [r.getMessage() for r in caplog.records] == [
        "all-reduce: NCCL for every size (no shared memory between GPUs: the device is cpu)"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a torch without CUDA")
def test_a_set_up_that_fails_leaves_nccl(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weft.runner"):
        group = torch.distributed.GroupMember
        assert one_shot(Two(), torch.device("cuda"), group, PIECE) is None
    (record,) = caplog.records
    assert "NCCL for every size" in record.getMessage() and "Error" in record.getMessage()


def test_all_ranks_or_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank fails to set up: the others must not sum alone."""

    def make(ranks: Any, device: torch.device, group: Any, limit: int, offer: Any) -> OneShot:
        if ranks.rank == 1:
            raise RuntimeError("no peer access")
        return OneShot(torch.clone, limit, "none")

    monkeypatch.setattr(module, "_obstacle", lambda device: None)
    monkeypatch.setattr(module, "_make", make)
    with caplog.at_level(logging.INFO, "weft.runner"):
        made = on_ranks(2, lambda ranks: one_shot(ranks, torch.device("cuda"), None, PIECE))
        assert made == [None] * 2
    assert [r.getMessage()[-17:] for r in caplog.records] == [" of another rank)"]


def test_ranks_of_several_hosts_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("one", "two"))
    monkeypatch.setattr(module, "_obstacle", lambda device: None)
    monkeypatch.setattr(module.socket, "gethostname", lambda: next(names))
    made = on_ranks(2, lambda ranks: one_shot(ranks, torch.device("cuda"), None, PIECE))
    assert made == [None, None]


def test_multicast_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    forbid_multicast()
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_the_limit_falls_with_the_square_of_the_ranks() -> None:
    assert [most(n) for n in (2, 4, 8)] == [4 << 20, 1 << 20, 256 << 10]
    assert all(most(n) % PIECE == 0 and most(n) for n in range(2, 17))


# ----------------------------------------------------------------------------------- two cards


def work(rank: int, meeting: str, results: Any, plugin: bool) -> None:
    """One rank: sums of several sizes and types, then a captured one with other numbers."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    request = KernelRequest(describe(device), "bfloat16", {"ranks": 2})
    offer = Host().kernel("all_reduce", request) if plugin else None
    ranks = TorchCollective(rank, 2, device, FileStore(meeting, 2), kernel=offer)
    wrong = [] if (offer is not None) == plugin else ["nobody offers a kernel"]
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for rows in (1, 3, 32, 4096):
            parts = [
                torch.randn(rows, 1024, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in (0, 1)
            ]
            got = ranks.all_reduce(parts[rank].to(device))
            if not torch.equal(got.cpu(), parts[0] + parts[1]):
                wrong.append(f"{dtype} {rows}")
    x = torch.zeros(8, 1024, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        ranks.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(4):
            y = ranks.all_reduce(y.clone())
    for step in range(20):
        x.fill_((step % 5) + rank)
        graph.replay()
        if not bool((y == 8 * (2 * (step % 5) + 1)).all()):
            wrong.append(f"replay {step}")
    for count in (2040, 8, 262144, 4096, 8, 1 << 20) * 40:  # chunks take turns of their own
        x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device=device)
        y = ranks.all_reduce(x)
        if not bool((y == 3).all()):
            wrong.append(f"{count} in a row of sums")
    results.put((rank, ranks.small.name if ranks.small else None, wrong))
    torch.cuda.synchronize()
    ranks.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("plugin", [False, True])
def test_two_cards_sum_alike_in_and_out_of_graphs(tmp_path: Path, plugin: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [
        spawn.Process(target=work, args=(rank, str(tmp_path / "meeting"), results, plugin))
        for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    found = sorted(results.get(timeout=180) for _ in workers)
    for worker in workers:
        worker.join(60)
    name = "kernel triton" if plugin else "torch's kernel"
    assert found == [(0, name, []), (1, name, [])]
