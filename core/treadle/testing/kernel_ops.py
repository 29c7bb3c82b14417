"""Every operation that kernel plugins and communicators may offer: what it computes, and its sizes.

Those of the sampler are declared here. Those of the layers are declared beside them, in
``treadle-layers-kit``: without it no model has such a layer, and they are missing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Generator, Tensor

from treadle.errors import ConfigError
from treadle.known_plugins import install_hint
from treadle.sampling import draw
from treadle.sampling.blocks import Blocks
from treadle.sampling.masks import apply_bitmask
from treadle.sampling.noise import uniforms
from treadle_layers_kit.kernel_op import KernelOp, Sizes, scalar, tensor

__all__ = ("COMMUNICATOR_OPS", "KERNEL_OPS", "require_layer_ops")

KIT = "treadle_layers_kit"


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
    tokens, invalid = draw.draw(weights, uniforms(offsets, strides, positions), blocks)
    return torch.where(greedy > 0, argmax(logits)[0], tokens) if mixed else tokens, invalid


def random_bits(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    """A mask for every row; the first allows everything."""
    mask = torch.randint(
        -(2**31), 2**31, (sizes["rows"], sizes["words"]), generator=generator, dtype=torch.int32
    )
    mask[0] = -1
    return mask


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
    KernelOp(
        name="apply_bitmask",
        about="""Sets the logits of tokens that a grammar does not allow to -inf, in place, and returns them:
        bit i % 32 of word i // 32 is token i, 1 is allowed. The last words may have no token.""",
        used_by="Sampler.bitmask_op",
        args=(
            tensor("logits", "rows, vocab_size", strided=True, access="write"),
            tensor("bitmask", "rows, words", dtype="int32"),
        ),
        returns=(LOGITS,),
        reference=apply_bitmask,
        example_sizes={"vocab_size": 128256, "words": 4009},
        small_sizes={"vocab_size": 300, "words": 11},
        examples={"bitmask": random_bits},
    ),
)


def layer_ops(kind: str) -> tuple[KernelOp, ...]:
    """``LAYER_OPS`` or ``COMMUNICATOR_OPS`` of the kit; none if it is not installed."""
    if find_spec(KIT) is None:
        return ()
    ops: tuple[KernelOp, ...] = getattr(import_module(f"{KIT}.kernel_ops"), kind)
    return ops


KERNEL_OPS: Mapping[str, KernelOp] = {op.name: op for op in (*layer_ops("LAYER_OPS"), *SAMPLER_OPS)}
"""Every operation that kernel plugins may offer, by name."""
COMMUNICATOR_OPS: Mapping[str, KernelOp] = {op.name: op for op in layer_ops("COMMUNICATOR_OPS")}
"""Operations between ranks, which a communicator may have, by name."""


def require_layer_ops() -> None:
    """Raise an error with the command that installs the kit, if its operations are missing."""
    if not COMMUNICATOR_OPS:
        raise ConfigError(
            "the operations of layers are declared by treadle-layers-kit, which is not installed; "
            + install_hint("treadle-layers-kit")
        )
