"""Products with 4-bit weights on one CUDA device: the kernel, unpacked first, GPTQ's own, bfloat16.

::

    python benchmarks/quantized.py [--sweep]

Each time is the median over replays of a CUDA graph that goes through enough weights to keep them out
of L2. The number of rows from which unpacking wins is what ``MOST_ROWS`` should be, that of
``weft.layers.int4.tiles`` and, for the kernel of other widths and of inputs in any order, that of
``weft_gptq.gemm``. With ``--sweep``, every tile of a list is timed for every shape.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from weft_gptq.kernel import gptq_gemm, gptq_unpack

from weft.layers.int4 import Tile, TiledInt4, choose
from weft.layers.int4.packing import pack_steps
from weft.layers.int4.tiles import MOST, MOST_ROWS

SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # in, out: of Qwen3-8B
ROWS = (1, 8, 16, 32, 64, 128, 256)
GROUP = 128
COLD = 256 << 20  # bytes of weights in rotation
TILES = tuple(
    Tile(outputs, rows, warps, stages, resident, fold)
    for outputs, warps in ((64, 4), (128, 4), (128, 8))
    for rows in (8, 16, 32, 64, 128)
    for stages in (3, 4, 5)
    for resident in (1, 2, 4)
    for fold in (False, True)
    if fold == (rows == 128) or rows == 64
)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, device="cuda").to(torch.int32)


def seconds(runs: list[Callable[[], object]]) -> float:
    """The median time of one of ``runs``."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times: list[float] = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(runs))
    return statistics.median(times[2:])


def tiled(depth: int, columns: int) -> TiledInt4:
    """A weight of random codes, repacked."""
    shape = (depth // GROUP, columns)
    scales = torch.rand(shape, device="cuda")
    steps = pack_steps(scales, torch.randint(0, 16, shape, device="cuda"), torch.bfloat16)
    codes = words(depth // 128, columns, 16).view(torch.int16)
    return TiledInt4(codes, steps, depth, GROUP)


def row(rows: int, depth: int, columns: int) -> list[float]:
    """Microseconds: kernel, unpacked, GPTQ's own kernel, unpacked, bfloat16."""
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    shape = (depth // GROUP, columns)
    made: list[list[Callable[[], object]]] = [[] for _ in range(5)]
    tile = choose(min(rows, MOST_ROWS), columns) or MOST  # also where it would not be used
    for _ in range(max(2, COLD // (depth * columns // 2))):
        own = tiled(depth, columns)
        made[0].append(lambda own=own: own.product(x, tile))
        made[1].append(lambda own=own: F.linear(x, own.unpack(x.dtype)))
        scales = torch.rand(shape, device="cuda", dtype=torch.bfloat16)
        zeros = torch.randint(0, 16, shape, device="cuda").to(torch.bfloat16)
        g = (words(depth // 8, columns), scales, zeros, 4, GROUP, None)
        made[2].append(lambda g=g: gptq_gemm(x, *g))
        made[3].append(lambda g=g: x @ gptq_unpack(*g, x.dtype))
    for _ in range(max(2, COLD // (2 * depth * columns))):
        dense = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
        made[4].append(lambda w=dense: F.linear(x, w))
    return [1e6 * seconds(runs) for runs in made]


def sweep() -> None:
    """The best tiles of a list."""
    for depth, columns in SHAPES:
        weights = [tiled(depth, columns) for _ in range(max(2, COLD // (depth * columns // 2)))]
        for rows in ROWS:
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
            found: list[tuple[float, Tile]] = []
            for tile in TILES:
                if rows <= tile.rows < 2 * max(rows, 8) or tile.rows == 64 <= rows:
                    runs = [lambda w=w, x=x, tile=tile: w.product(x, tile) for w in weights]
                    found.append((1e6 * seconds(runs), tile))
            found.sort(key=lambda each: each[0])
            print(f"{depth} x {columns}, {rows} rows")
            for time, tile in found[:6]:
                print(f"{time:9.1f}  {tile}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    if "--sweep" in sys.argv[1:]:
        sweep()
        return
    print(f"{'in x out':>14} {'rows':>5}       kernel  unpacked   GPTQ's own  unpacked   bfloat16")
    for depth, columns in SHAPES:
        for rows in ROWS:
            a, b, c, d, e = row(rows, depth, columns)
            size = f"{depth} x {columns}"
            print(
                f"{size:>14} {rows:>5} {a:12.1f} {b:9.1f} {c:12.1f} {d:9.1f} {e:10.1f}", flush=True
            )


if __name__ == "__main__":
    main()
