"""Choosing a token from logits in one pass over them.

The arithmetic is that of ``treadle.sampling.draw``: blocks of the vocabulary, then a token of the chosen
block, each by a cumulative sum over integers. Here the blocks' sums come straight from the logits,
relative to the largest logit that a program sees, so that the logits are read once and no
probabilities are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_triton_kit.pdl import launch_dependents, wait_for_previous_kernel

__all__ = ("argmax", "block_stats_kernel", "sample", "sample_kernel")


@triton.jit
def block_stats_kernel(
    logits,  # [rows, VOCAB], rows stride elements apart
    stride,
    temperature,  # float32 [rows], t_stride elements apart
    t_stride,
    tops,  # float32 [rows, parts]: each part's largest logit over temperature
    firsts,  # int32 [rows, parts]: the lowest id that has it, if GREEDY
    sums,  # float32 [rows, COUNT]: of exp(logit / temperature - top) per block, if RANDOM
    VOCAB: tl.constexpr,
    COUNT: tl.constexpr,  # blocks of the vocabulary
    WIDTH: tl.constexpr,  # tokens of a block
    WIDE: tl.constexpr,  # the power of two that holds WIDTH
    BLOCKS: tl.constexpr,  # blocks of a part
    RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (part, row)."""
    launch_dependents(EARLY)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, WIDE)
    ids = block[:, None] * WIDTH + lane[None, :]
    inside = (lane < WIDTH)[None, :] & (ids < VOCAB)
    wait_for_previous_kernel(EARLY)
    x = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if RANDOM:
        x = x * tl.math.div_rn(1.0, tl.load(temperature + row * t_stride))
    top = tl.max(tl.max(x, axis=1), axis=0)
    at = row * tl.num_programs(0) + part
    if GREEDY:
        # A maximum passes over NaN, so that it is looked for by name.
        broken = tl.sum(tl.sum((x != x).to(tl.int32), axis=1), axis=0) > 0
        first = tl.min(tl.min(tl.where(x == top, ids, VOCAB), axis=1), axis=0)
        tl.store(firsts + at, first)
        tl.store(tops + at, tl.where(broken, float("nan"), top))
    else:
        tl.store(tops + at, top)
    if RANDOM:
        # Where everything is -inf the sums are 0; a NaN or +inf makes one of them NaN.
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
        tl.store(sums + row * COUNT + block, tl.sum(weights, axis=1), mask=block < COUNT)


@triton.jit
def _uniform(offsets, strides, position):
    """See ``treadle.sampling.noise.uniforms``: SplitMix64 at one counter."""
    z = (tl.load(offsets) + position * tl.load(strides)).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _invert(weights, uniform, SCALE: tl.constexpr):
    """The first index whose cumulative weight exceeds ``uniform`` of the total; weights ``[n]``."""
    whole = (weights * SCALE).to(tl.int64)
    cumulative = tl.cumsum(whole, axis=0)
    target = (tl.sum(whole, axis=0).to(tl.float64) * uniform).to(tl.int64)
    return tl.sum((cumulative <= target).to(tl.int32), axis=0)


@triton.jit
def sample_kernel(
    logits,
    stride,
    temperature,
    t_stride,
    greedy,  # int32 [rows], g_stride elements apart: 1 where the likeliest token is asked for
    g_stride,
    offsets,  # int64 [rows, 2], o_stride elements apart
    strides,  # int64 [rows, 2], likewise
    o_stride,
    positions,  # int64 [rows]
    tops,
    firsts,
    sums,
    tokens,  # int64 [rows]
    bad,  # uint8 [rows]
    parts,
    VOCAB: tl.constexpr,
    COUNT: tl.constexpr,
    ROOM: tl.constexpr,  # the power of two that holds COUNT
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program chooses one row's token from what ``block_stats_kernel`` found."""
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, ROOM)
    valid = block < COUNT
    own = tops + row * parts
    wait_for_previous_kernel(EARLY)
    top_of = tl.load(own + block // BLOCKS, mask=valid, other=float("-inf"))
    top = tl.max(top_of, axis=0)
    token = 0
    if RANDOM:
        factor = tl.exp(top_of - tl.where(top == float("-inf"), 0.0, top))
        mass = tl.load(sums + row * COUNT + block, mask=valid, other=0.0) * factor
        total = tl.sum(mass, axis=0)
        broken = (total != total) | (total == 0.0)
        position = tl.load(positions + row)
        offsets += row * o_stride
        strides += row * o_stride
        chosen = _invert(mass / total, _uniform(offsets, strides, position), 1125899906842624.0)
        chosen = tl.minimum(tl.where(broken, 0, chosen), COUNT - 1)
        lane = tl.arange(0, WIDE)
        ids = chosen * WIDTH + lane
        inside = (lane < WIDTH) & (ids < VOCAB)
        x = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        x = x * tl.math.div_rn(1.0, tl.load(temperature + row * t_stride))
        local = tl.max(x, axis=0)
        weights = tl.exp(x - tl.where(local == float("-inf"), 0.0, local))
        weights = tl.where(broken, 0.0, weights)
        inner = _invert(weights, _uniform(offsets + 1, strides + 1, position), 4398046511104.0)
        token = chosen * WIDTH + tl.minimum(inner, WIDTH - 1)
    if GREEDY:
        whole = tl.sum((top_of != top_of).to(tl.int32), axis=0) == 0
        best = tl.load(firsts + row * parts + block // BLOCKS, mask=valid, other=VOCAB)
        best = tl.min(tl.where(top_of == top, best, VOCAB), axis=0)
        if RANDOM:
            token = tl.where(tl.load(greedy + row * g_stride) > 0, best, token)
        else:
            token = best
            # 0 * x is 0 for a finite x and NaN otherwise.
            broken = (top * 0.0 != 0.0) | (not whole)
    tl.store(tokens + row, tl.minimum(token, VOCAB - 1).to(tl.int64))
    tl.store(bad + row, broken.to(tl.uint8))


def _blocks(rows: int, count: int, wide: int) -> int:
    """Blocks of a part: 4,096 tokens where rows fill the device, 1,024 where they do not."""
    wanted = 1024 if rows * count * wide < 1 << 22 else 4096
    return int(max(1, min(triton.next_power_of_2(count), wanted // wide)))


def _run(
    logits: Tensor,
    width: int,
    temperature: Tensor,
    greedy: Tensor,
    offsets: Tensor,
    strides: Tensor,
    positions: Tensor,
    modes: tuple[bool, bool],
    early: bool,
) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, wide = triton.cdiv(vocab, width), triton.next_power_of_2(width)
    blocks = _blocks(rows, count, wide)
    parts = triton.cdiv(count, blocks)
    random, likely = modes
    new = logits.new_empty
    tops = new((rows, parts), dtype=torch.float32)
    firsts = new((rows, parts), dtype=torch.int32)
    sums = new((rows, count if random else 1), dtype=torch.float32)
    tokens, bad = new(rows, dtype=torch.int64), new(rows, dtype=torch.uint8)
    block_stats_kernel[(parts, rows)](
        logits, logits.stride(0), temperature, temperature.stride(0), tops, firsts, sums,
        VOCAB=vocab, COUNT=count, WIDTH=width, WIDE=wide, BLOCKS=blocks,
        RANDOM=random, GREEDY=likely, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    sample_kernel[(rows,)](
        logits, logits.stride(0), temperature, temperature.stride(0),
        greedy, greedy.stride(0), offsets, strides, offsets.stride(0), positions,
        tops, firsts, sums, tokens, bad, parts,
        VOCAB=vocab, COUNT=count, ROOM=triton.next_power_of_2(count), WIDTH=width, WIDE=wide,
        BLOCKS=blocks, RANDOM=random, GREEDY=likely, EARLY=early, num_warps=8, launch_pdl=early,
    )  # fmt: skip
    return tokens, bad.view(torch.bool)


def sample(
    logits: Tensor,
    width: int,
    temperature: Tensor,
    greedy: Tensor,
    offsets: Tensor,
    strides: Tensor,
    positions: Tensor,
    mixed: bool,
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operation ``sample`` of ``treadle_layers_kit.kernel_ops``."""
    modes = (True, mixed)
    return _run(logits, width, temperature, greedy, offsets, strides, positions, modes, early)


def argmax(logits: Tensor, *, early: bool = False) -> tuple[Tensor, Tensor]:
    """The operation ``argmax`` of ``treadle_layers_kit.kernel_ops``."""
    x = logits
    return _run(x, min(128, x.shape[1]), x, x, x, x, x, (False, True), early)
