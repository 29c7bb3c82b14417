"""Kernels in the place of the sampler's own operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from treadle.api.attention import KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.layers.fusion import Kernels
from treadle.layers.kernel_op import KernelOp, scalar, tensor
from treadle.layers.kernel_ops import LAYER_OPS
from treadle.sampling import draw
from treadle.sampling.blocks import Blocks
from treadle.sampling.noise import uniforms
from treadle.sampling.sampler import Sampler

__all__ = ("KERNEL_OPS", "SAMPLER_OPS", "install_sampler_kernels")


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest id of the largest logit, and whether the row's maximum is not finite."""
    return draw.argmax(logits, Blocks.of(logits.shape[1], logits.device))


def sample(
    logits: Tensor,
    width: int,
    temperature: Tensor,
    greedy: Tensor,
    offsets: Tensor,
    strides: Tensor,
    positions: Tensor,
    mixed: bool,
) -> tuple[Tensor, Tensor]:
    """Draw from the softmax of ``logits / temperature``, or take the argmax of ``greedy`` rows."""
    blocks = Blocks.of(logits.shape[1], logits.device)
    weights = (logits.float() / temperature[:, None]).softmax(dim=-1)
    tokens, bad = draw.draw(weights, uniforms(offsets, strides, positions), blocks)
    return torch.where(greedy > 0, argmax(logits)[0], tokens) if mixed else tokens, bad


LOGITS = tensor("logits", "rows, vocab_size", strided=True)
TOKENS = (tensor("tokens", "rows", dtype="int64"), tensor("bad", "rows", dtype="bool"))

SAMPLER_OPS: tuple[KernelOp, ...] = (
    KernelOp(
        name="sample",
        about="""Draws a token as treadle.sampling.draw does: from softmax(logits / temperature) in blocks of
        width tokens, with the random numbers of treadle.sampling.noise at positions; if mixed, the argmax
        in greedy rows. bad marks rows without a usable distribution. The order of float32 sums is free.""",
        used_by="Sampler.sample_op",
        args=(
            LOGITS,
            scalar("width"),
            tensor("temperature", "rows", dtype="float32", strided=True),
            tensor("greedy", "rows", dtype="int32", strided=True),
            tensor("offsets", "rows, 2", dtype="int64", strided=True),
            tensor("strides", "rows, 2", dtype="int64", strided=True),
            tensor("positions", "rows", dtype="int64"),
            scalar("mixed", True),
        ),
        returns=TOKENS,
        reference=sample,
        example_sizes={"vocab_size": 128256},
        small_sizes={"vocab_size": 300},
    ),
    KernelOp(
        name="argmax",
        about="The lowest id of the largest logit; bad marks rows whose maximum is not finite.",
        used_by="Sampler.argmax_op",
        args=(LOGITS,),
        returns=TOKENS,
        reference=argmax,
        example_sizes={"vocab_size": 128256},
        small_sizes={"vocab_size": 300},
    ),
)

KERNEL_OPS: Mapping[str, KernelOp] = {op.name: op for op in (*LAYER_OPS, *SAMPLER_OPS)}
"""Every operation that kernel plugins may offer, by name."""


def install_sampler_kernels(
    sampler: Sampler, plugins: Kernels, device: DeviceInfo, dtype: str
) -> dict[str, str]:
    """Give the sampler the best kernel that is offered for each operation.

    Returns the plugin's name by operation.
    """
    request = KernelRequest(device, dtype, {"vocab_size": sampler.vocab_size})
    offers = {op.name: plugins.kernel(op.name, request) for op in SAMPLER_OPS}
    if (offer := offers["sample"]) is not None:
        sampler.sample_op = offer.load()
    if (offer := offers["argmax"]) is not None:
        sampler.argmax_op = offer.load()
    return {op: offer.name for op, offer in offers.items() if offer is not None}
