"""Random weights of the right shapes, for tests and benchmarks without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

__all__ = ("DummyLoader", "fill_randomly")

# Drawing all elements of a large matrix takes minutes on a CPU; repeating them does no harm.
PERIOD = 1 << 22

EXPONENT = 120
"""Of scales that are exponents, less 127: random ones would be beyond all numbers."""

BLOCK_BYTE = 0x3C
"""Above the bytes of blocks, such as GGUF's: the float16 numbers among them are less than 1."""


class DummyLoader:
    """A loader of random weights, which reads no files."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def fill(self, model: nn.Module) -> None:
        fill_randomly(model, self.seed)


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Fill every parameter from a generator seeded with ``seed`` and the parameter's name.

    Matrices have small values around zero, norm scales are one, biases are zero, integer matrices
    are random bits, so that activations stay finite at any depth. All ranks draw the same numbers,
    so that replicated parameters are equal.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device)
        # A 32-bit seed, since CPU generators ignore higher bits.
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        _fill(name, parameter.data, generator)


def _fill(name: str, data: Tensor, generator: torch.Generator) -> None:
    if data.dtype is torch.uint8 and name.endswith(("scale", "scales")):
        data.fill_(EXPONENT)
        return None
    if not data.is_floating_point():
        return _fill_bits(data, generator)
    if data.dim() < 2:
        data.fill_(0.0 if name.endswith("bias") else 1.0)
        return None
    values = data.view(-1)
    period = min(values.numel(), PERIOD)
    samples = torch.empty(period, dtype=torch.float32, device=data.device)
    samples.normal_(0.0, 0.02, generator=generator)
    for start in range(0, values.numel(), period):
        chunk = values[start : start + period]
        chunk.copy_(samples[: chunk.numel()])
    return None


def _fill_bits(data: Tensor, generator: torch.Generator) -> None:
    if data.dim() < 2:
        data.zero_()
    elif data.dtype is torch.uint8 and data.dim() == 3:
        data.random_(0, BLOCK_BYTE, generator=generator)
    else:
        info = torch.iinfo(data.dtype)
        data.random_(info.min, info.max, generator=generator)
