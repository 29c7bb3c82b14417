"""Which tiles the products of the kernels run with: plain numbers, chosen from the shape of the problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ("BLOCK", "Tile", "choose_experts_tile", "choose_int8_tile", "choose_tile")

BLOCK = 128
"""Inputs, and outputs, of one scale where scales are by block."""
CUBLAS_BLOCKS = 4
"""Blocks of inputs of which cuBLAS takes a multiple: with another number torch refuses, or the product is wrong."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One program multiplies ``block_n`` outputs by ``block_m`` rows, ``block_k`` inputs at a time, ``num_stages`` of them
    on their way; ``num_splits`` programs share the inputs. Of many blocks of rows, ``group_m`` take turns."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    group_m: int = 1

    def fit(self, shared_bytes: int) -> Tile:
        """Return this tile with as many stages as fit into the shared memory of a multiprocessor."""
        most = shared_bytes // ((self.block_n + self.block_m) * self.block_k)
        return self if most >= self.num_stages else replace(self, num_stages=max(most, 1))


MANY_BY_BLOCK = Tile(128, 64, BLOCK, 4, 4, group_m=8)
"""For many rows with scales by block: of two such programs on a multiprocessor one multiplies while the other one scales, and
their sums fit into registers."""


def choose_tile(
    rows: int, out_features: int, in_features: int, has_block_scales: bool = False
) -> Tile | None:
    """For ``[rows, in_features]`` by ``[out_features, in_features]``; ``None``: cuBLAS is the better one.

    Measured on one H200 with ``benchmarks/fp8.py``, the shapes of Qwen3-8B: with a scale for each row the
    kernel takes 0.5 to 0.9 of cuBLAS's time for up to 64 rows, and of 4,096 outputs for up to 128. Of block scales that
    cuBLAS does not take, the kernel multiplies all rows.
    """
    is_narrow, is_deep = out_features <= 4096, in_features > 8192
    if has_block_scales:
        if rows > 64:
            return None if in_features % (CUBLAS_BLOCKS * BLOCK) == 0 else MANY_BY_BLOCK
        return Tile(64, _block_m(rows), BLOCK, 4, 4, 4 if out_features <= 8192 else 1)
    if rows > 128 or (rows > 64 and not is_narrow):
        return None
    if rows > 64:
        return Tile(128, 128, 128, 8, 4, 4) if is_deep else Tile(64, 64, 256, 4, 4)
    if rows > 32:
        if out_features > 16384:
            return Tile(128, 64, 128, 4, 4)
        return (
            Tile(64, 64, 128, 4, 5, 4)
            if is_deep
            else Tile(64, 64, 256, 4, 4, 2 if is_narrow else 1)
        )
    if rows > 16 and out_features > 16384:
        return Tile(64, 32, 128, 4, 5)
    return Tile(64, _block_m(rows), 256, 4, 4, 4 if is_narrow and in_features >= 2048 else 1)


def choose_int8_tile(rows: int, out_features: int, in_features: int) -> Tile:
    """As ``choose_tile``, in int8, where the kernel is always the better one.

    Of more than 512 rows all have the same tile, because a start does not run each number of them. Measured
    as above: ``torch._int_mm``, with a kernel that scales its sums, takes 1.2 to 2.2 times as long.
    """
    if rows <= 16 and out_features > 16384:
        return Tile(128, 16, 128, 4, 4)
    if (tile := choose_tile(rows, out_features, in_features)) is not None:
        return tile
    if rows > 512 or (rows > 256 and out_features > 4096):
        return Tile(128, 256, 128, 8, 3, group_m=8)
    programs = -(-out_features // 64) * -(-rows // 128)
    return Tile(64, 128, 128, 4, 4, 2 if programs <= 128 else 1, group_m=8)


def choose_experts_tile(
    tokens: int, k: int, experts: int, *, has_block_scales: bool = False
) -> Tile:
    """For ``tokens`` that choose ``k`` of ``experts``: room for twice the mean of an expert.

    As above, of more than 512 tokens all have the same tile, whether in FP8 or int8.
    """
    room = 2 * -(-tokens * k // experts)
    if tokens > 512 or room > 64:
        return MANY_BY_BLOCK if has_block_scales else Tile(128, 128, 128, 8, 4, group_m=8)
    num_stages = 4 if has_block_scales else 6 if room <= 32 else 5
    return Tile(64, _block_m(room), 128, 4, num_stages, group_m=8)


def _block_m(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64
