"""Which steps run before they are captured, and how many of a model's layers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from treadle.config import SchedulerConfig
from treadle_worker_kit import capture
from treadle_worker_kit.stages import StartStages

LAYERS = 6


class Layer(nn.Module):
    def __init__(self, index: int, ran: list[int]) -> None:
        super().__init__()
        self.index, self.ran = index, ran
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(self.index)
        return self.up(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[int] = []
        self.layers = nn.ModuleList(Layer(i, self.ran) for i in range(LAYERS))


class Info(msgspec.Struct):
    max_graph_tokens: int = 0


class Graphs:
    """Captured steps that say which layers ran, and how a size was warmed up last.

    Launching takes ``share`` of a step's time; ``waiting`` are sizes with a wait for the device.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.share = 0.0
        self.waiting: tuple[int, ...] = ()
        self.sync_debug_mode: int | str = 0
        self.warm: dict[int, list[int]] = {}
        self.captured: dict[int, list[int]] = {}

    def warm_up(self, size: int, *, with_sampling: bool = False) -> float:
        if size in self.waiting and self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.model.ran.clear()
        x = torch.zeros(1, 4)
        for layer in self.model.layers:
            x = layer(x)
        self.warm[size] = list(self.model.ran)
        return self.share

    def capture(self, size: int, *, with_sampling: bool = False) -> bool:
        self.captured[size] = self.warm[size]
        return True

    def forward(self) -> None: ...


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    graphs = Graphs(Model())
    monkeypatch.setattr(capture, "StepGraphs", lambda *_: graphs)
    monkeypatch.setattr(capture, "PromptGraphs", lambda *_: graphs)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", partial(setattr, graphs, "sync_debug_mode")
    )
    return graphs


def captured(
    graphs: Graphs, function: Any, most: int | None = None, **limits: Any
) -> dict[int, list[int]]:
    stages = StartStages()
    stages.model = graphs.model
    runner: Any = SimpleNamespace(
        info=Info(), sampler=SimpleNamespace(sample_op=None, argmax_op=None)
    )
    loaded: Any = SimpleNamespace(attention=())
    options = {"has_room": limits.pop("has_room")} if "has_room" in limits else {}
    function(runner, loaded, SchedulerConfig(**limits), stages, **options)
    assert runner.info.max_graph_tokens == (most or max(graphs.captured))
    return graphs.captured


@pytest.mark.parametrize("sequences", [16, 512])
@pytest.mark.parametrize("function", [capture._capture_steps, capture._capture_pieces])
def test_all_layers_run_before_the_largest_step_is_captured(
    graphs: Graphs, function: Any, sequences: int
) -> None:
    layers = captured(graphs, function, max_num_seqs=sequences, max_num_batched_tokens=1024)
    assert len(layers) > 5
    assert layers.pop(max(layers)) == list(range(LAYERS))
    # And before any other, the first, the last, and one of those that are alike.
    assert set(map(tuple, layers.values())) == {(0, 1, LAYERS - 1)}


@pytest.mark.parametrize(
    ("share", "waiting", "has_room", "long"),
    [
        (0.9, (), True, {4096, 8192}),
        (0.1, (), True, set()),
        (0.9, (8192,), True, {4096}),
        (0.9, (4096,), True, {8192}),
        (0.9, (), False, set()),
    ],
)
def test_full_steps_are_captured_where_launching_takes_long(
    graphs: Graphs, share: float, waiting: tuple[int, ...], has_room: bool, long: set[int]
) -> None:
    """Unless the model waits for the device there, which would spoil a capture, or has no memory for it."""
    graphs.share, graphs.waiting = share, waiting
    layers = captured(
        graphs, capture._capture_pieces, max_num_batched_tokens=8192, most=2048, max_num_seqs=16,
        has_room=has_room,
    )  # fmt: skip
    assert {size for size in layers if size > 2048} == long
    assert list(layers) == sorted(layers, reverse=True), (
        "the largest first: the others are in its memory"
    )
