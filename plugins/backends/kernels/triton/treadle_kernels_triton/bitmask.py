"""Forbidding tokens: a grammar's bitmask over logits, in one pass that reads no logit."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("apply_bitmask", "bitmask_kernel")

BLOCK_SIZE = 4096


@triton.jit
def bitmask_kernel(
    logits,  # [rows, vocab_size], rows stride elements apart
    stride,
    bitmask,  # int32 [rows, words], rows num_words apart
    num_words,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (block, row)."""
    launch_dependents(USE_PDL)
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    in_vocab = ids < vocab_size
    wait_for_previous_kernel(USE_PDL)
    words = tl.load(bitmask + row * num_words + ids // 32, mask=in_vocab, other=-1)
    is_forbidden = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits + row * stride + ids, float("-inf"), mask=in_vocab & is_forbidden)


def apply_bitmask(logits: Tensor, bitmask: Tensor, *, use_pdl: bool = False) -> Tensor:
    """The operation ``apply_bitmask`` of ``treadle.testing.kernel_ops``."""
    num_rows, vocab_size = logits.shape
    bitmask_kernel[(triton.cdiv(vocab_size, BLOCK_SIZE), num_rows)](
        logits, logits.stride(0), bitmask, bitmask.stride(0), vocab_size,
        BLOCK_SIZE=BLOCK_SIZE, USE_PDL=use_pdl, num_warps=8, launch_pdl=use_pdl,
    )  # fmt: skip
    return logits
