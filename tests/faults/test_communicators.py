"""A communicator that fails: at start the ranks do without it, in a step the error names the plugin."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.api.communicators import CommunicatorRequest, SupportsFusedOps
from treadle.api.kinds import COMMUNICATORS
from treadle.api.types import DeviceInfo
from treadle.config import PluginConfig
from treadle.errors import PluginLoadError
from treadle.plugins import PluginManager
from treadle.testing.ranks import run_on_ranks
from treadle_worker_kit.communicator import choose_communicator

fault = pytest.mark.fault
CPU = torch.device("cpu")
PLUGIN = """
from types import SimpleNamespace

from treadle.api import impl
from treadle.api.types import CommunicatorOffer

TREADLE = {"communicators": ["odd"]}


def fails(*arguments):
    raise ValueError("the odd thing")


class Odd:
    name, rank, world_size = "odd", 0, 2
    memory_bytes = property(fails)
    all_reduce = all_gather = all_reduce_min = set_dry_run = staticmethod(fails)

    def create_fused_op(self, op, size, dtype):
        return SimpleNamespace(run=fails) if op == "all_gather" else fails()


def create(base, device):
    if FAULT == "create" and base.rank == 1:
        fails()
    return Odd()


@impl
def treadle_communicator(request):
    if FAULT == "hook":
        fails()
    return CommunicatorOffer("odd", 99, create)
"""


@pytest.fixture
def plugins(tmp_path: Path, request: pytest.FixtureRequest) -> PluginManager:
    file = tmp_path / "odd.py"
    file.write_text(f"FAULT = {request.param!r}\n{PLUGIN}")
    return PluginManager(PluginConfig(plugin_file=[str(file)]), source=list)


@fault("communicators", "hook")
@pytest.mark.parametrize("plugins", ["hook"], indirect=True)
def test_a_bid_that_raises_is_a_refusal(plugins: PluginManager) -> None:
    request = CommunicatorRequest(DeviceInfo("cpu"), 2)
    assert plugins.best_offer(COMMUNICATORS, request=request) is None
    [refusal] = plugins.offers(COMMUNICATORS, request=request)[1]
    assert refusal.name == "odd" and "the odd thing" in refusal.reasons[0]


@fault("communicators", "create")
@pytest.mark.parametrize("plugins", ["create"], indirect=True)
def test_a_rank_that_cannot_create_it_leaves_all_without(
    plugins: PluginManager, caplog: pytest.LogCaptureFixture
) -> None:
    def run(base: Any) -> bool:
        return choose_communicator(plugins, base, CPU) is base

    with caplog.at_level(logging.INFO, "treadle.workers"):
        assert run_on_ranks(2, run) == [True, True]
    [text] = [record.getMessage() for record in caplog.records]
    assert "communicator odd is not used" in text and "the odd thing" in text


@fault("communicators", "memory_bytes")
@pytest.mark.parametrize("plugins", [""], indirect=True)
def test_a_property_that_raises_names_its_plugin(plugins: PluginManager) -> None:
    [communicator, _] = run_on_ranks(2, lambda base: choose_communicator(plugins, base, CPU))
    with pytest.raises(PluginLoadError, match=r"odd.*memory_bytes.*the odd thing"):
        communicator.memory_bytes  # noqa: B018


@fault(
    "communicators",
    "all_reduce",
    "all_gather",
    "all_reduce_min",
    "create_fused_op",
    "set_dry_run",
)
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("all_reduce", (torch.zeros(3),)),
        ("all_gather", (torch.zeros(3), -1)),
        ("all_reduce_min", ([1],)),
        ("set_dry_run", (True,)),
        ("create_fused_op", ("all_reduce_add_rms_norm", 8, torch.float32)),
    ],
)
@pytest.mark.parametrize("plugins", [""], indirect=True)
def test_a_method_that_raises_names_its_plugin(
    plugins: PluginManager, method: str, arguments: tuple[Any, ...]
) -> None:
    [communicator, _] = run_on_ranks(2, lambda base: choose_communicator(plugins, base, CPU))
    assert isinstance(communicator, SupportsFusedOps) and communicator.name == "odd"
    with pytest.raises(PluginLoadError, match=rf"odd.*{method}.*the odd thing"):
        getattr(communicator, method)(*arguments)


@fault("communicators", "run")
@pytest.mark.parametrize("plugins", [""], indirect=True)
def test_a_fused_operation_that_raises_names_its_plugin(plugins: PluginManager) -> None:
    [communicator, _] = run_on_ranks(2, lambda base: choose_communicator(plugins, base, CPU))
    assert isinstance(communicator, SupportsFusedOps)
    fused = communicator.create_fused_op("all_gather", 8, torch.float32)
    assert fused is not None
    with pytest.raises(PluginLoadError, match=r"odd.*run.*the odd thing"):
        fused.run(torch.zeros(1, 8))
