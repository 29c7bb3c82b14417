"""Layers that are alike, of which one runs while kernels are compiled ahead."""

import torch
from torch import Tensor, nn

from treadle_worker_kit.repeated_layers import repeated_layers


class Layer(nn.Module):
    def __init__(self, size: int, ran: list[int]) -> None:
        super().__init__()
        self.up = nn.Linear(4, size)
        self.experts = nn.ModuleList(nn.Linear(size, 4) for _ in range(4))
        self.index, self.ran = len(ran), ran
        ran.append(self.index)

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(self.index)
        x = self.up(x)
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


class Model(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.ran: list[int] = []
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(size, self.ran) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        self.ran.clear()
        for layer in self.decoder.layers:
            x = layer(x)
        return x


def test_one_of_each_kind_runs_and_the_first_and_the_last() -> None:
    model = Model([8, 8, 8, 6, 8, 6, 8])
    x = torch.randn(3, 4)
    expected = model(x)
    assert model.ran == list(range(7))
    with repeated_layers(model):
        assert model(x).shape == expected.shape
        assert model.ran == [0, 1, 3, 6]
        assert model(torch.randn(5, 4)).shape == (5, 4)
    assert torch.equal(model(x), expected)
    assert model.ran == list(range(7))


def test_layers_of_different_attention_run() -> None:
    model = Model([8, 8, 8, 8, 8])
    model.decoder.layers[2].up.attn_group = 1
    with repeated_layers(model):
        model(torch.randn(3, 4))
    assert model.ran == [0, 1, 2, 4]


def test_without_a_model_nothing_happens() -> None:
    with repeated_layers(None), repeated_layers(nn.Linear(2, 2)):
        pass
