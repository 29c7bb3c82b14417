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
    logits,  # [rows, VOCAB_SIZE], rows stride elements apart
    stride,
    temperature,  # float32 [rows], t_stride elements apart
    t_stride,
    tile_max,  # float32 [rows, tiles]: each tile's largest logit over temperature
    tile_argmax,  # int32 [rows, tiles]: the lowest id that has it, if GREEDY
    block_sum,  # float32 [rows, NUM_BLOCKS]: of exp(logit / temperature - top) per block, if RANDOM
    VOCAB_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # blocks of the vocabulary
    BLOCK_SIZE: tl.constexpr,  # tokens of a block
    BLOCK_SIZE_PADDED: tl.constexpr,  # the power of two that holds BLOCK_SIZE
    BLOCKS_PER_TILE: tl.constexpr,  # blocks of a tile
    RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (tile, row)."""
    launch_dependents(USE_PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_block = tile * BLOCKS_PER_TILE + tl.arange(0, BLOCKS_PER_TILE)
    lane = tl.arange(0, BLOCK_SIZE_PADDED)
    ids = offs_block[:, None] * BLOCK_SIZE + lane[None, :]
    mask = (lane < BLOCK_SIZE)[None, :] & (ids < VOCAB_SIZE)
    wait_for_previous_kernel(USE_PDL)
    x = tl.load(logits + row * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    if RANDOM:
        x = x * tl.math.div_rn(1.0, tl.load(temperature + row * t_stride))
    max_value = tl.max(tl.max(x, axis=1), axis=0)
    offset = row * tl.num_programs(0) + tile
    if GREEDY:
        # A maximum passes over NaN, so that it is looked for by name.
        has_nan = tl.sum(tl.sum((x != x).to(tl.int32), axis=1), axis=0) > 0
        token = tl.min(tl.min(tl.where(x == max_value, ids, VOCAB_SIZE), axis=1), axis=0)
        tl.store(tile_argmax + offset, token)
        tl.store(tile_max + offset, tl.where(has_nan, float("nan"), max_value))
    else:
        tl.store(tile_max + offset, max_value)
    if RANDOM:
        # Where everything is -inf the sums are 0; a NaN or +inf makes one of them NaN.
        weights = tl.exp(x - tl.where(max_value == float("-inf"), 0.0, max_value))
        tl.store(
            block_sum + row * NUM_BLOCKS + offs_block,
            tl.sum(weights, axis=1),
            mask=offs_block < NUM_BLOCKS,
        )


@triton.jit
def _random_uniform(offsets, strides, position):
    """See ``treadle.sampling.noise.uniforms``: SplitMix64 at one counter."""
    z = (tl.load(offsets) + position * tl.load(strides)).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _sample_inverse_cdf(weights, uniform, SCALE: tl.constexpr):
    """The first index whose cumulative weight exceeds ``uniform`` of the total; weights ``[n]``."""
    fixed_point = (weights * SCALE).to(tl.int64)
    cumulative = tl.cumsum(fixed_point, axis=0)
    target = (tl.sum(fixed_point, axis=0).to(tl.float64) * uniform).to(tl.int64)
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
    tile_max,
    tile_argmax,
    block_sum,
    tokens,  # int64 [rows]
    invalid,  # uint8 [rows]
    num_tiles,
    VOCAB_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_BLOCKS_PADDED: tl.constexpr,  # the power of two that holds NUM_BLOCKS
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_PADDED: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr,
    RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program chooses one row's token from what ``block_stats_kernel`` found."""
    launch_dependents(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_block = tl.arange(0, NUM_BLOCKS_PADDED)
    valid = offs_block < NUM_BLOCKS
    tile_max_row = tile_max + row * num_tiles
    wait_for_previous_kernel(USE_PDL)
    block_max = tl.load(
        tile_max_row + offs_block // BLOCKS_PER_TILE, mask=valid, other=float("-inf")
    )
    row_max = tl.max(block_max, axis=0)
    token = 0
    if RANDOM:
        rescale = tl.exp(block_max - tl.where(row_max == float("-inf"), 0.0, row_max))
        block_weight = (
            tl.load(block_sum + row * NUM_BLOCKS + offs_block, mask=valid, other=0.0) * rescale
        )
        total = tl.sum(block_weight, axis=0)
        is_invalid = (total != total) | (total == 0.0)
        position = tl.load(positions + row)
        offsets += row * o_stride
        strides += row * o_stride
        block_idx = _sample_inverse_cdf(
            block_weight / total, _random_uniform(offsets, strides, position), 1125899906842624.0
        )
        block_idx = tl.minimum(tl.where(is_invalid, 0, block_idx), NUM_BLOCKS - 1)
        lane = tl.arange(0, BLOCK_SIZE_PADDED)
        ids = block_idx * BLOCK_SIZE + lane
        mask = (lane < BLOCK_SIZE) & (ids < VOCAB_SIZE)
        x = tl.load(logits + row * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
        x = x * tl.math.div_rn(1.0, tl.load(temperature + row * t_stride))
        local_max = tl.max(x, axis=0)
        weights = tl.exp(x - tl.where(local_max == float("-inf"), 0.0, local_max))
        weights = tl.where(is_invalid, 0.0, weights)
        token_offset = _sample_inverse_cdf(
            weights, _random_uniform(offsets + 1, strides + 1, position), 4398046511104.0
        )
        token = block_idx * BLOCK_SIZE + tl.minimum(token_offset, BLOCK_SIZE - 1)
    if GREEDY:
        has_no_nan = tl.sum((block_max != block_max).to(tl.int32), axis=0) == 0
        greedy_token = tl.load(
            tile_argmax + row * num_tiles + offs_block // BLOCKS_PER_TILE,
            mask=valid,
            other=VOCAB_SIZE,
        )
        greedy_token = tl.min(tl.where(block_max == row_max, greedy_token, VOCAB_SIZE), axis=0)
        if RANDOM:
            token = tl.where(tl.load(greedy + row * g_stride) > 0, greedy_token, token)
        else:
            token = greedy_token
            # 0 * x is 0 for a finite x and NaN otherwise.
            is_invalid = (row_max * 0.0 != 0.0) | (not has_no_nan)
    tl.store(tokens + row, tl.minimum(token, VOCAB_SIZE - 1).to(tl.int64))
    tl.store(invalid + row, is_invalid.to(tl.uint8))


def _blocks_per_tile(num_rows: int, num_blocks: int, block_size_padded: int) -> int:
    """Blocks of a part: 4,096 tokens where rows fill the device, 1,024 where they do not."""
    tile_tokens = 1024 if num_rows * num_blocks * block_size_padded < 1 << 22 else 4096
    return int(max(1, min(triton.next_power_of_2(num_blocks), tile_tokens // block_size_padded)))


def _launch(
    logits: Tensor,
    block_size: int,
    temperature: Tensor,
    greedy: Tensor,
    offsets: Tensor,
    strides: Tensor,
    positions: Tensor,
    modes: tuple[bool, bool],
    use_pdl: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_blocks, block_size_padded = (
        triton.cdiv(vocab_size, block_size),
        triton.next_power_of_2(block_size),
    )
    blocks_per_tile = _blocks_per_tile(num_rows, num_blocks, block_size_padded)
    num_tiles = triton.cdiv(num_blocks, blocks_per_tile)
    use_random, use_greedy = modes
    new_empty = logits.new_empty
    tile_max = new_empty((num_rows, num_tiles), dtype=torch.float32)
    tile_argmax = new_empty((num_rows, num_tiles), dtype=torch.int32)
    block_sum = new_empty((num_rows, num_blocks if use_random else 1), dtype=torch.float32)
    tokens, invalid = new_empty(num_rows, dtype=torch.int64), new_empty(num_rows, dtype=torch.uint8)
    block_stats_kernel[(num_tiles, num_rows)](
        logits, logits.stride(0), temperature, temperature.stride(0), tile_max, tile_argmax, block_sum,
        VOCAB_SIZE=vocab_size, NUM_BLOCKS=num_blocks, BLOCK_SIZE=block_size, BLOCK_SIZE_PADDED=block_size_padded, BLOCKS_PER_TILE=blocks_per_tile,
        RANDOM=use_random, GREEDY=use_greedy, USE_PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip
    sample_kernel[(num_rows,)](
        logits, logits.stride(0), temperature, temperature.stride(0),
        greedy, greedy.stride(0), offsets, strides, offsets.stride(0), positions,
        tile_max, tile_argmax, block_sum, tokens, invalid, num_tiles,
        VOCAB_SIZE=vocab_size, NUM_BLOCKS=num_blocks, NUM_BLOCKS_PADDED=triton.next_power_of_2(num_blocks), BLOCK_SIZE=block_size, BLOCK_SIZE_PADDED=block_size_padded,
        BLOCKS_PER_TILE=blocks_per_tile, RANDOM=use_random, GREEDY=use_greedy, USE_PDL=use_pdl, num_warps=8, launch_pdl=use_pdl,
    )  # fmt: skip
    return tokens, invalid.view(torch.bool)


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
    use_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operation ``sample`` of ``treadle_layers_kit.kernel_ops``."""
    modes = (True, mixed)
    return _launch(logits, width, temperature, greedy, offsets, strides, positions, modes, use_pdl)


def argmax(logits: Tensor, *, use_pdl: bool = False) -> tuple[Tensor, Tensor]:
    """The operation ``argmax`` of ``treadle_layers_kit.kernel_ops``."""
    x = logits
    return _launch(x, min(128, x.shape[1]), x, x, x, x, x, (False, True), use_pdl)
