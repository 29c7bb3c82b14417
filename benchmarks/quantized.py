"""Products with 4-bit weights on one CUDA device: the kernels, unpacked first, GPTQ's own, bfloat16.

::

    python benchmarks/quantized.py [--sweep]

Each time is the median over replays of a CUDA graph that goes through enough weights to keep them out
of L2; what is compared takes turns, so that the device's clock is the same for all. The first column is
the operation ``int4_linear`` of ``treadle-kernels-triton``, as a model has it; then Triton's kernel and, on
Hopper, the one written in Gluon, with a tile of theirs whether or not it would be chosen. The rules to
change are in ``treadle_kernels_triton.int4.tiles``, for the kernel of other widths and of inputs in any
order in ``treadle_gptq.gemm``. With ``--sweep``, every tile of a list is timed for every shape.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from treadle_gptq.kernel import gptq_gemm, gptq_unpack
from treadle_kernels_triton import treadle_kernel_op
from treadle_kernels_triton.int4 import hopper, kernel
from treadle_kernels_triton.int4.product import num_sms
from treadle_kernels_triton.int4.tiles import MOST, WIDES, HopperTile, Tile, choose, choose_wide

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.int4_layout import pack_steps

SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # in, out: of Qwen3-8B
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
MOST_OWN = 256
"""Rows that GPTQ's kernel is timed for."""
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

Run = Callable[[], object]


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, device="cuda").to(torch.int32)


def captured(runs: list[Run]) -> torch.cuda.CUDAGraph:
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def microseconds(made: dict[str, list[Run]]) -> dict[str, float]:
    """The median time of one of the runs of each."""
    graphs = {name: captured(runs) for name, runs in made.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(12):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / len(made[name]))
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def packed(depth: int, columns: int) -> PackedInt4:
    """A weight of random codes."""
    shape = (depth // GROUP, columns)
    scales = torch.rand(shape, device="cuda")
    steps = pack_steps(scales, torch.randint(0, 16, shape, device="cuda"), torch.bfloat16)
    return PackedInt4(words(depth // 128, columns, 16).view(torch.int16), steps, depth, GROUP)


def operation(depth: int, columns: int) -> Callable[..., Tensor]:
    """What an engine gives to layers of that shape."""
    shape = {"in_features": depth, "out_features": columns, "group": GROUP}
    device = DeviceInfo("cuda", torch.cuda.get_device_capability())
    offer = treadle_kernel_op("int4_linear", KernelRequest(device, "bfloat16", shape))
    if not isinstance(offer, KernelOffer):
        raise SystemExit(f"no kernel for int4_linear here: {offer}")
    return offer.load()


def with_tile(x: Tensor, own: PackedInt4, tile: Tile | HopperTile, tickets: Tensor) -> Run:
    given = (x, own.codes, own.scales, GROUP)
    if isinstance(tile, HopperTile):
        return partial(hopper.multiply, *given, tile, tickets, num_sms(x.device))
    return partial(kernel.multiply, *given, tile, tickets, num_sms(x.device))


def row(rows: int, depth: int, columns: int) -> dict[str, float]:
    """Microseconds."""
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    tickets = torch.zeros(4096, dtype=torch.int32, device="cuda")
    op = operation(depth, columns)
    shape = (depth // GROUP, columns)
    made: dict[str, list[Run]] = {}

    def add(name: str, run: Run) -> None:
        made.setdefault(name, []).append(run)

    for _ in range(max(2, COLD // (depth * columns // 2))):
        own = packed(depth, columns)
        given = (own.codes, own.scales, depth, GROUP)
        add("int4_linear", partial(op, x, *given))
        add("Triton", with_tile(x, own, choose(rows, columns) or MOST, tickets))
        if hopper.serves(torch.cuda.get_device_capability(), columns, GROUP):
            add("Gluon", with_tile(x, own, choose_wide(rows, depth, columns) or WIDES[0], tickets))
        add("unpacked", lambda g=given: F.linear(x, kernel.unpack(*g, x.dtype)))
        if rows <= MOST_OWN:
            scales = torch.rand(shape, device="cuda", dtype=torch.bfloat16)
            zeros = torch.randint(0, 16, shape, device="cuda").to(torch.bfloat16)
            g = (words(depth // 8, columns), scales, zeros, 4, GROUP, None)
            add("GPTQ's own", partial(gptq_gemm, x, *g))
            add("GPTQ unpacked", lambda g=g: x @ gptq_unpack(*g, x.dtype))
    for _ in range(max(2, COLD // (2 * depth * columns))):
        dense = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
        add("bfloat16", partial(F.linear, x, dense))
    return microseconds(made)


def sweep() -> None:
    """The best tiles of a list."""
    tickets = torch.zeros(4096, dtype=torch.int32, device="cuda")
    own_tiles: tuple[Tile | HopperTile, ...] = TILES
    if hopper.serves(torch.cuda.get_device_capability(), 128, GROUP):
        own_tiles += WIDES
    for depth, columns in SHAPES:
        weights = [packed(depth, columns) for _ in range(max(2, COLD // (depth * columns // 2)))]
        for rows in ROWS:
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
            found: list[tuple[float, Tile | HopperTile]] = []
            for tile in own_tiles:
                fits = rows <= tile.rows < 2 * max(rows, 8) or tile.rows == 64 <= rows <= 256
                if fits or (isinstance(tile, HopperTile) and rows >= tile.rows):
                    runs = [with_tile(x, weight, tile, tickets) for weight in weights]
                    found.append((microseconds({"": runs})[""], tile))
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
    for depth, columns in SHAPES:
        print(f"{depth} x {columns} (in x out)")
        for rows in ROWS:
            times = row(rows, depth, columns)
            text = "  ".join(f"{name} {time:.1f}" for name, time in times.items())
            print(f"{rows:>6} rows: {text}", flush=True)


if __name__ == "__main__":
    main()
