"""Products in FP8 on one CUDA device: the kernel of treadle-fp8, cuBLAS, bfloat16.

::

    python benchmarks/fp8.py

Each time is in microseconds, the median over replays of a CUDA graph that goes through enough weights
to keep them out of L2. The activations are rounded beforehand; the last lines say what that takes, with
the gate of a feed-forward layer and without. Where the kernel is the faster one,
``treadle_fp8_kit.tiles.choose_tile`` should give a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernels import seconds
from torch import Tensor

from treadle_fp8_kit.kernels import multiply, quantize_per_block, quantize_per_row
from treadle_fp8_kit.tiles import BLOCK, choose_tile

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))  # out, in: of Qwen3-8B
ROWS = (1, 8, 16, 32, 64, 128, 192, 256)
CACHE_BYTES = 256 << 20  # bytes of weights in rotation


def timed(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> str:
    calls: list[Callable[[], object]] = [lambda w=w: product(w) for w in weights]
    return f"{1e6 * seconds(calls):9.1f}"


def row(rows: int, width: int, depth: int) -> str:
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    count = max(2, CACHE_BYTES // (width * depth))
    dense = [torch.randn(width, depth, device="cuda").to(x.dtype) for _ in range(count)]
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


def rounding(rows: int, size: int, gated: bool) -> str:
    x = torch.randn(rows, size * (1 + gated), device="cuda", dtype=torch.bfloat16)
    return timed(
        lambda x: quantize_per_row(x, None, None, rows, gated=gated, use_pdl=True)[0], [x] * 8
    )


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    print(
        f"{'out x in':>14} {'rows':>5} bfloat16  by rows:  kernel  by blocks: kernel",
    )
    for width, depth in SHAPES:
        for rows in ROWS:
            print(f"{f'{width} x {depth}':>14} {rows:>5}{row(rows, width, depth)}", flush=True)
    print(f"{'rounding':>14} {'rows':>5}    plain    gated")
    for size in (4096, 12288):
        for rows in (1, 256, 8192):
            text = rounding(rows, size, False) + rounding(rows, size, True)
            print(f"{size:>14} {rows:>5}{text}", flush=True)


if __name__ == "__main__":
    main()
