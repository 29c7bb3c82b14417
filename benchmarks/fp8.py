"""Products in FP8 on one CUDA device: the kernel of treadle-fp8, cuBLAS, bfloat16.

::

    python benchmarks/fp8.py

Each time is in microseconds, the median over replays of a CUDA graph that goes through enough weights
to keep them out of L2. The activations are rounded beforehand; the last lines say what that takes, with
the gate of a feed-forward layer and without. Where the kernel is the faster one,
``treadle_fp8.tiles.choose`` should give a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from quantized import seconds
from torch import Tensor
from treadle_fp8.kernels import multiply, quantize_per_block, quantize_per_row
from treadle_fp8.tiles import BLOCK, choose

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))  # out, in: of Qwen3-8B
ROWS = (1, 8, 16, 32, 64, 128, 192, 256)
COLD = 256 << 20  # bytes of weights in rotation


def timed(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> str:
    runs: list[Callable[[], object]] = [lambda w=w: product(w) for w in weights]
    return f"{1e6 * seconds(runs):9.1f}"


def row(rows: int, width: int, depth: int) -> str:
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    count = max(2, COLD // (width * depth))
    dense = [torch.randn(width, depth, device="cuda").to(x.dtype) for _ in range(count)]
    weights = [w.to(torch.float8_e4m3fn) for w in dense]
    text = timed(lambda w: torch.nn.functional.linear(x, w), dense)
    room = -(-rows // 128) * 128
    by_row = torch.rand(width, device="cuda")
    by_block = torch.rand(width // BLOCK, depth // BLOCK, device="cuda")
    for rounds, scale, scale_b in (
        (lambda n: quantize_per_row(x, None, None, n, early=True), by_row, by_row[None, :]),
        (lambda n: quantize_per_block(x, n, early=True), by_block, by_block.t()),
    ):
        few, own = rounds(room)
        text += timed(
            lambda w, few=few, own=own, b=scale_b: torch._scaled_mm(
                few, w.t(), scale_a=own, scale_b=b, out_dtype=x.dtype
            ),
            weights,
        )
        tile = choose(rows, width, depth, blocks=scale.dim() == 2)
        if tile is None:
            text += f"{'':9}"
            continue
        few, own = rounds(rows)
        text += timed(
            lambda w, few=few, own=own, scale=scale, tile=tile: multiply(
                few, own, w, scale, None, x.dtype, tile, early=True
            ),
            weights,
        )
    return text


def rounding(rows: int, size: int, gated: bool) -> str:
    x = torch.randn(rows, size * (1 + gated), device="cuda", dtype=torch.bfloat16)
    return timed(
        lambda x: quantize_per_row(x, None, None, rows, gated=gated, early=True)[0], [x] * 8
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
