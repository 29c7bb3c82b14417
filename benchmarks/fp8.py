"""Products in FP8 and int8 on one CUDA device: cuBLAS and the kernels, beside bfloat16.

::

    python benchmarks/fp8.py [fp8] [int8] [sweep]

Each time is the median over replays of a CUDA graph that goes through enough weights to keep
them out of L2. The activations are rounded beforehand; the last lines say what that takes, with
the gate of a feed-forward layer and without. Where the kernel is the faster one,
``treadle_fp8_kit.tiles.choose_tile`` should give a tile. In int8 cuBLAS is timed with what scales its sums in torch.
With ``sweep``, the best int8 tiles of a list are printed, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from kernels import seconds
from torch import Tensor

from treadle_fp8_kit.kernels import multiply, quantize_per_block, quantize_per_row
from treadle_fp8_kit.quantize import INT8, scale_products
from treadle_fp8_kit.tiles import BLOCK, Tile, choose_int8_tile, choose_tile

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))  # out, in: of Qwen3-8B
ROWS = (1, 8, 16, 32, 64, 128, 192, 256)
INT8_ROWS = (*ROWS, 512, 1024, 4096, 8192)
CACHE_BYTES = 256 << 20  # bytes of weights in rotation


def timed(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> str:
    return f"{microseconds(product, weights):9.1f}"


def microseconds(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    calls: list[Callable[[], object]] = [lambda w=w: product(w) for w in weights]
    return 1e6 * seconds(calls)


def dense_weights(width: int, depth: int) -> list[Tensor]:
    count = max(2, CACHE_BYTES // (width * depth))
    kwargs = {"device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(width, depth, **kwargs) for _ in range(count)]


def row(rows: int, width: int, depth: int) -> str:
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    dense = dense_weights(width, depth)
    weights = [w.to(torch.float8_e4m3fn) for w in dense]
    text = timed(lambda w: torch.nn.functional.linear(x, w), dense)
    padded_rows = -(-rows // 128) * 128
    row_scale = torch.rand(width, device="cuda")
    block_scale = torch.rand(width // BLOCK, depth // BLOCK, device="cuda")
    for quantize_fn, scale, scale_b in (
        (lambda n: quantize_per_row(x, None, None, n, use_pdl=True), row_scale, row_scale[None, :]),
        (lambda n: quantize_per_block(x, n, use_pdl=True), block_scale, block_scale.t()),
    ):
        x_fp8, x_scale = quantize_fn(padded_rows)
        text += timed(
            lambda w, x_fp8=x_fp8, x_scale=x_scale, b=scale_b: torch._scaled_mm(
                x_fp8, w.t(), scale_a=x_scale, scale_b=b, out_dtype=x.dtype
            ),
            weights,
        )
        tile = choose_tile(rows, width, depth, has_block_scales=scale.dim() == 2)
        if tile is None:
            text += f"{'':9}"
            continue
        x_fp8, x_scale = quantize_fn(rows)
        text += timed(
            lambda w, x_fp8=x_fp8, x_scale=x_scale, scale=scale, tile=tile: multiply(
                x_fp8, x_scale, w, scale, None, x.dtype, tile, use_pdl=True
            ),
            weights,
        )
    return text


class Int8Case:
    """A shape of weights in rotation, and rows of activations."""

    def __init__(self, rows: int, dense: list[Tensor]) -> None:
        width, depth = dense[0].shape
        self.x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        self.rows, self.dense, self.scale = rows, dense, torch.rand(width, device="cuda")
        self.weights = [(w * 30).to(INT8) for w in dense]

    def quantized(self, rows: int) -> tuple[Tensor, Tensor]:
        return quantize_per_row(self.x, None, None, rows, dtype=INT8, use_pdl=True)

    def with_tile(self, tile: Tile) -> float:
        x, x_scale = self.quantized(self.rows)
        arguments = (self.scale, None, self.x.dtype, tile)
        return microseconds(
            lambda w: multiply(x, x_scale, w, *arguments, use_pdl=True), self.weights
        )

    def with_cublas(self) -> float:
        x, x_scale = self.quantized(-(-self.rows // 128) * 128)
        arguments = (x_scale, self.scale, None, self.x.dtype, None)

        def product(weight: Tensor) -> Tensor:
            return scale_products(torch._int_mm(x, weight.t())[: self.rows], *arguments)

        return microseconds(product, self.weights)

    def line(self) -> str:
        width, depth = self.dense[0].shape
        tile = choose_int8_tile(self.rows, width, depth)
        dense = microseconds(lambda w: torch.nn.functional.linear(self.x, w), self.dense)
        return f"{dense:9.1f}{self.with_cublas():9.1f}{self.with_tile(tile):9.1f}"

    def best(self) -> str:
        times = sorted((self.with_tile(tile), str(tile)) for tile in candidates(self.rows))
        return "\n".join(f"{'':20}{time:9.1f} {tile}" for time, tile in times[:3])


def candidates(rows: int) -> Iterator[Tile]:
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        for block_n, block_k, warps, stages in (
            *((64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 4, 8)),
            *((64, 256, 4, 3), (64, 256, 4, 4), (64, 512, 4, 3)),
            *((128, 128, 4, 4), (128, 128, 4, 6), (128, 256, 8, 3)),
        ):
            for num_splits in 1, 2, 4:
                yield Tile(block_n, block_m, block_k, warps, stages, num_splits)
        return
    for block_n, block_m, block_k, warps, stages in (
        *((64, 64, 128, 4, 5), (64, 64, 256, 4, 4), (64, 128, 128, 4, 4)),
        *((128, 64, 128, 4, 4), (128, 128, 128, 8, 4), (128, 256, 128, 8, 3)),
        *((256, 128, 128, 8, 3), (128, 256, 128, 8, 4)),
    ):
        for num_splits in (1, 2, 4) if rows <= 256 else (1,):
            yield Tile(block_n, block_m, block_k, warps, stages, num_splits, group_m=8)


def rounding(rows: int, size: int, gated: bool) -> str:
    x = torch.randn(rows, size * (1 + gated), device="cuda", dtype=torch.bfloat16)
    return "".join(
        timed(
            lambda x, dtype=dtype: quantize_per_row(
                x, None, None, rows, dtype=dtype, gated=gated, use_pdl=True
            )[0],
            [x] * 8,
        )
        for dtype in (torch.float8_e4m3fn, INT8)
    )


def time_fp8() -> None:
    print(f"{'out x in':>14} {'rows':>5} bfloat16  by rows:  kernel  by blocks: kernel")
    for width, depth in SHAPES:
        for rows in ROWS:
            print(f"{f'{width} x {depth}':>14} {rows:>5}{row(rows, width, depth)}", flush=True)


def time_int8(*, sweep: bool) -> None:
    print(f"{'out x in':>14} {'rows':>5} bfloat16  _int_mm   kernel")
    for width, depth in SHAPES:
        dense = dense_weights(width, depth)
        for rows in INT8_ROWS:
            case = Int8Case(rows, dense)
            print(f"{f'{width} x {depth}':>14} {rows:>5}{case.line()}", flush=True)
            if sweep:
                print(case.best(), flush=True)


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    kinds = sys.argv[1:] or ["fp8", "int8"]
    if "fp8" in kinds:
        time_fp8()
    if "int8" in kinds or "sweep" in kinds:
        time_int8(sweep="sweep" in kinds)
    print(f"{'rounding':>14} {'rows':>5}    plain     int8    gated     int8")
    for size in (4096, 12288):
        for rows in (1, 256, 8192):
            text = rounding(rows, size, False) + rounding(rows, size, True)
            print(f"{size:>14} {rows:>5}{text}", flush=True)


if __name__ == "__main__":
    main()
