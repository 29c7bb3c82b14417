"""The communicator of a worker: torch.distributed, or what a plugin offers if all ranks can use it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treadle.api.communicators import Communicator, CommunicatorOffer, CommunicatorRequest
from treadle.api.plugin_kind import PluginKind
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import SingleRankCommunicator, dry_run
from treadle_worker_kit.communicator import TorchCommunicator, choose_communicator, forbid_multicast

CPU = torch.device("cpu")
Create = Callable[[Communicator, torch.device], Communicator]


class Wrapped:
    """What a plugin makes of the communicator over torch.distributed."""

    memory_bytes = 64

    def __init__(self, base: Communicator) -> None:
        self.rank, self.world_size = base.rank, base.world_size
        self.all_reduce, self.all_gather = base.all_reduce, base.all_gather
        self.all_reduce_min = base.all_reduce_min


class Offers:
    def __init__(self, create: Create | None, name: str = "mine") -> None:
        self.create, self.name = create, name

    def best_offer(
        self, kind: PluginKind[CommunicatorOffer], *, request: CommunicatorRequest
    ) -> CommunicatorOffer | None:
        assert request.device.type == "cpu" and request.world_size == 2
        return CommunicatorOffer(self.name, 1, self.create) if self.create else None


def test_an_offer_is_used_on_all_ranks() -> None:
    def run(base: Communicator) -> bool:
        offers = Offers(lambda base, device: Wrapped(base))
        return isinstance(choose_communicator(offers, base, CPU), Wrapped)

    assert run_on_ranks(2, run) == [True, True]


def test_one_rank_needs_none() -> None:
    base = SingleRankCommunicator()

    def fail(request: CommunicatorRequest) -> CommunicatorOffer | None:
        raise AssertionError("nobody is asked")

    offers = Offers(None)
    offers.communicator = fail  # type: ignore[method-assign]
    assert choose_communicator(offers, base, CPU) is base


@pytest.mark.parametrize("reason", ["nobody offers", "offers differ", "one rank raises"])
def test_otherwise_no_rank_uses_it(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    def run(base: Communicator) -> bool:
        def create(base: Communicator, device: torch.device) -> Communicator:
            if reason == "one rank raises" and base.rank:
                raise RuntimeError("no peer access")
            return Wrapped(base)

        name = f"mine{base.rank}" if reason == "offers differ" else "mine"
        offers = Offers(None if reason == "nobody offers" else create, name)
        return choose_communicator(offers, base, CPU) is base

    with caplog.at_level(logging.INFO, "treadle.workers"):
        assert run_on_ranks(2, run) == [True, True]
    texts = [record.getMessage() for record in caplog.records]
    raised = ["communicator mine is not used: no peer access"]
    assert texts == (raised if reason == "one rank raises" else [])


def test_torch_distributed_alone(tmp_path: Path) -> None:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    ranks = TorchCommunicator(0, 1, CPU, FileStore(str(tmp_path / "meeting"), 1))
    try:
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(ranks.all_reduce(x.clone()), x)
        assert torch.equal(ranks.all_gather(x), x) and torch.equal(ranks.all_gather(x, 0), x)
        assert ranks.all_reduce_min([3, -1]) == [3, -1] and ranks.memory_bytes == 0
        assert ranks.all_reduce_min([1 << 40]) == [1 << 40] and ranks.all_reduce_min([]) == []
        with dry_run(ranks) as compiles:
            assert compiles
            assert torch.equal(ranks.all_reduce(x), x) and torch.equal(ranks.all_gather(x), x)
    finally:
        ranks.close()


def test_multicast_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    forbid_multicast()
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_ranks_agree_without_their_devices(tmp_path: Path) -> None:
    """Each in its turn, however late; a dry run waits for nobody, and gathers what it has itself."""
    script = """
import sys, time, torch
from torch.distributed import FileStore
from treadle_worker_kit.communicator import TorchCommunicator

rank = int(sys.argv[1])
ranks = TorchCommunicator(rank, 2, torch.device("cpu"), FileStore(sys.argv[2], 2))
assert ranks.all_reduce_min([rank, 5 - rank]) == [0, 4]
if rank:
    time.sleep(0.3)
    ranks.set_dry_run(True)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(ranks.all_reduce(x), x)
    assert torch.equal(ranks.all_gather(x), torch.cat([x, x], -1))
    assert torch.equal(ranks.all_gather(x, 0), torch.cat([x, x]))
    ranks.set_dry_run(False)
assert ranks.all_reduce_min([7 - rank]) == [6]
assert ranks.all_reduce(torch.ones(2)).tolist() == [2, 2]
ranks.close()
"""
    command = [sys.executable, "-c", script]
    meeting = str(tmp_path / "meeting")
    workers = [subprocess.Popen([*command, str(rank), meeting]) for rank in range(2)]
    assert [worker.wait(120) for worker in workers] == [0, 0]
