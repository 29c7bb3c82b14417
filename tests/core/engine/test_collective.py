"""The ranks of one model: what is summed by one kernel, and that nothing breaks without it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.api.attention import KernelOffer, KernelRequest
from treadle.api.models import Collective, ModelContext, Shared
from treadle.config import forbid_multicast
from treadle.layers import LMHead, NullCollective, RMSNorm
from treadle.layers.kernels import install_kernels
from treadle.plugins import PluginManager
from treadle.runner import collective
from treadle.runner import custom_all_reduce as module
from treadle.runner.collective import TorchCollective
from treadle.runner.custom_all_reduce import PIECE, OneShot, most, one_shot
from treadle.runner.device import describe
from treadle.runner.symmetric import share
from treadle.testing.ranks import on_ranks


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
    with caplog.at_level(logging.INFO, "treadle.runner"):
        assert one_shot(Two(), torch.device("cpu"), None, PIECE) is None
    assert [r.getMessage() for r in caplog.records] == [
        "all-reduce: NCCL for every size (no shared memory between GPUs: the device is cpu)"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a torch without CUDA")
def test_a_set_up_that_fails_leaves_nccl(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "treadle.runner"):
        group = torch.distributed.GroupMember
        assert one_shot(Two(), torch.device("cuda"), group, PIECE) is None
    (record,) = caplog.records
    assert "NCCL for every size" in record.getMessage() and "Error" in record.getMessage()


def test_all_ranks_or_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank fails to set up: the others must not sum alone."""

    def make(ranks: Any, *others: Any) -> OneShot:
        if ranks.rank == 1:
            raise RuntimeError("no peer access")
        return OneShot(torch.clone, PIECE, "none")

    monkeypatch.setattr(module, "_obstacle", lambda device: None)
    monkeypatch.setattr(module, "_make", make)
    with caplog.at_level(logging.INFO, "treadle.runner"):
        made = on_ranks(2, lambda ranks: one_shot(ranks, torch.device("cuda"), None, PIECE))
        assert made == [None] * 2
    assert [r.getMessage()[-17:] for r in caplog.records] == [" of another rank)"]


def test_ranks_of_several_hosts_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("one", "two"))
    monkeypatch.setattr(module, "_obstacle", lambda device: None)
    monkeypatch.setattr(module.socket, "gethostname", lambda: next(names))
    made = on_ranks(2, lambda ranks: one_shot(ranks, torch.device("cuda"), None, PIECE))
    assert made == [None, None]


def test_memory_is_shared_by_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no room, or cannot reach the others: none may wait for it."""
    import torch.distributed._symmetric_memory as symmetric

    failing: list[str] = []
    sizes: list[int] = []

    def fail(name: str) -> None:
        if name in failing:
            failing.remove(name)  # one rank, whichever comes first
            raise RuntimeError(name)

    def empty(size: int, **options: Any) -> torch.Tensor:
        fail("empty")
        sizes.append(size)
        return torch.ones(size, **options)

    def rendezvous(buffer: torch.Tensor, group: str) -> Any:
        fail("rendezvous")
        return SimpleNamespace(buffer_ptrs=[16, 32], rank=0)

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group = SimpleNamespace(group_name="all")
    for fault in "empty", "rendezvous":
        failing.append(fault)
        assert on_ranks(2, lambda r: share(r, torch.device("cpu"), group, 64, 3)) == [None] * 2
        assert not failing
    for made in on_ranks(2, lambda r: share(r, torch.device("cpu"), group, 64, 3)):
        assert made is not None and made.limit == 64 and made.places.tolist() == [16, 32]
        assert made.counts.tolist() == [0] * 3 and made.counts.dtype == torch.int32
        buffer, _ = made.owner  # type: ignore[misc]
        assert not buffer.any()
    assert set(sizes) == {3 * 2 * 64}


def test_what_a_rank_shares_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    ranks = TorchCollective(0, 1, torch.device("cpu"), FileStore(str(tmp_path / "meeting"), 1))
    try:
        monkeypatch.setattr(collective, "share", lambda *given: given[-2] or None)
        assert ranks.share(64, 3) == 64 and ranks.share(0, 3) is None
        assert ranks.share(32, 3) == 32 and ranks.shared == 3 * (64 + 32)
    finally:
        ranks.close()


def test_multicast_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    forbid_multicast()
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.parametrize("size", [2, 4])
def test_a_plugins_kernel_makes_sums_of_any_size_between_two(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_obstacle", lambda device: None)

    def run(ranks: Any) -> tuple[OneShot | None, list[int]]:
        seen: list[int] = []

        def kernel(x: Tensor, places: Tensor, counts: Tensor, rank: int) -> Tensor:
            assert len(counts) == 4, "a program has a piece"
            seen.append(x.nbytes)
            return ranks.all_reduce(x)

        ranks.share = lambda limit, units: Shared(
            torch.zeros(size), torch.zeros(units), ranks.rank, limit
        )
        offer = KernelOffer("mine", 1, lambda: kernel)
        return one_shot(ranks, torch.device("cpu"), None, 4 * PIECE, offer), seen

    with caplog.at_level(logging.INFO, "treadle.runner"):
        found = on_ranks(size, run)
    for made, seen in found:
        assert made is not None
        large = torch.empty(64, PIECE)
        assert made.fits(large[:1]) and made.fits(large) == (size == 2)
        assert (max(seen) > 4 * PIECE) == (size == 2), "what is used has been tried"
    beyond = "" if size == 2 else " up to 16 KiB, NCCL beyond"
    assert [r.getMessage() for r in caplog.records] == [f"all-reduce: kernel mine{beyond}"]


def test_the_limit_falls_with_the_cube_of_the_ranks() -> None:
    assert [most(n) for n in (2, 4, 8)] == [4 << 20, 512 << 10, 64 << 10]
    assert all(most(n) % PIECE == 0 and most(n) for n in range(2, 17))


# ------------------------------------------------------------------------------- several cards


def work(rank: int, size: int, meeting: str, results: Any, plugin: bool) -> None:
    """One rank: sums of several sizes and types, then a captured one with other numbers."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    request = KernelRequest(describe(device), "bfloat16", {"ranks": size})
    offer = PluginManager().kernel("all_reduce", request) if plugin else None
    ranks = TorchCollective(rank, size, device, FileStore(meeting, size), kernel=offer)
    wrong = [] if (offer is not None) == plugin else ["nobody offers a kernel"]
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for rows in (1, 3, 32, 4096):
            # Whole numbers, so that the order of the sum does not matter.
            parts = [
                torch.randint(-16, 17, (rows, 1024), generator=torch.Generator().manual_seed(r))
                for r in range(size)
            ]
            got = ranks.all_reduce(parts[rank].to(device, dtype))
            if not torch.equal(got.cpu(), sum(parts[1:], parts[0]).to(dtype)):
                wrong.append(f"{dtype} {rows}")
    total = size * (size - 1) // 2
    x = torch.zeros(8, 1024, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        ranks.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(2):
            y = ranks.all_reduce(y.clone())
    for step in range(20):
        x.fill_((step % 5) + rank)
        graph.replay()
        if not bool((y == size * (size * (step % 5) + total)).all()):
            wrong.append(f"replay {step}")
    for count in (2040, 8, 262144, 4096, 8, 1 << 20) * 40:  # chunks take turns of their own
        x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device=device)
        y = ranks.all_reduce(x)
        if not bool((y == total + size).all()):
            wrong.append(f"{count} in a row of sums")
    if plugin:
        wrong += between(ranks, device)
    results.put((rank, ranks.small.name if ranks.small else None, wrong))
    torch.cuda.synchronize()
    ranks.close()


def between(ranks: Collective, device: torch.device) -> list[str]:
    """What norms that sum and a gather get wrong, called and captured, some turns of several sizes."""
    kind = torch.bfloat16
    context = ModelContext(
        hf_config=None,
        dtype=kind,
        device=device,
        ranks=ranks,
        quantization=None,
        attention=lambda request, spec: pytest.fail("there is no attention here"),
    )
    with device:
        norm, head = RMSNorm(context, 4096, 1e-6), LMHead(context, "head", 64, 151936)
    norm.ranks = ranks
    norm.weight.data.uniform_(0.5, 2)
    model = torch.nn.ModuleList([norm, head])
    served = install_kernels(model, PluginManager(), describe(device), "bfloat16")
    sum_op, gather_op = norm.sum_op, head.gather_op
    if sum_op is None or gather_op is None:
        return [f"only {served} are served"]

    def summed(x: Tensor) -> list[Tensor]:
        y, total = norm(x.clone(), x.clone())
        return list(norm(y, total))

    def gathered(x: Tensor) -> list[Tensor]:
        return [
            head.gather_op(part) if head.gather_op else ranks.all_gather(part) for part in (x, -x)
        ]

    torch.manual_seed(ranks.rank)
    wrong = []
    for run, width in (summed, 4096), (gathered, head.out_features):
        for rows in (1, 3, 226, 1500, 3):
            if run is summed and rows * width * kind.itemsize > ranks.sum_limit:
                continue
            x = torch.randn(rows, width, dtype=kind, device=device).relu_()  # zeros count, too
            run(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run(x)
            for turn in range(5):
                x.normal_().relu_()
                norm.sum_op = head.gather_op = None
                wanted = run(x)
                norm.sum_op, head.gather_op = sum_op, gather_op
                graph.replay()
                slack = 2**-7 * (run is summed)  # the order of a norm's sum is free
                for how, found in ("captured", captured), ("called", run(x)):
                    if not all(
                        torch.allclose(y, want, slack, slack)
                        for y, want in zip(found, wanted, strict=True)
                    ):
                        wrong.append(f"{run.__name__} of {rows}, {how}, turn {turn}")
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_cards_sum_alike_in_and_out_of_graphs(tmp_path: Path, size: int, plugin: bool) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [
        spawn.Process(target=work, args=(rank, size, str(tmp_path / "meeting"), results, plugin))
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    found = sorted(results.get(timeout=180) for _ in workers)
    for worker in workers:
        worker.join(60)
    name = "kernel triton" if plugin else "torch's kernel"
    assert found == [(rank, name, []) for rank in range(size)]
