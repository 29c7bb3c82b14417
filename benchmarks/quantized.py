"""Products with 4-bit weights on one CUDA device: the kernels, unpacked first, bfloat16.

::

    python benchmarks/quantized.py [--sweep]

Each time is the median over replays of a CUDA graph that goes through enough weights to keep them out
of L2; what is compared takes turns, so that the device's clock is the same for all. The first column is
the operation ``int4_linear`` of ``treadle-kernels-triton``, as a model has it; then Triton's kernel and, on
Hopper, the one written in Gluon, with a tile of theirs whether or not it would be chosen. The rules to
change are in ``treadle_kernels_triton.int4.tiles`` and ``hopper.packed_product``. With ``--sweep``, every tile of a list is timed for every shape.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from treadle_kernels_triton import treadle_kernel_op
from treadle_kernels_triton.hopper import packed_product
from treadle_kernels_triton.int4 import kernel
from treadle_kernels_triton.int4.linear import num_sms
from treadle_kernels_triton.int4.tiles import LARGE_M_TILE, Tile, choose_tile

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.int4_layout import pack_steps

SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # in, out: of Qwen3-8B
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
GROUP = 128
CACHE_BYTES = 256 << 20  # bytes of weights in rotation
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


def captured(calls: list[Run]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def microseconds(calls: dict[str, list[Run]]) -> dict[str, float]:
    """The median time of one of the runs of each."""
    graphs = {name: captured(call_list) for name, call_list in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(12):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / len(calls[name]))
    return {name: statistics.median(samples[2:]) for name, samples in times.items()}


def packed(depth: int, columns: int) -> PackedInt4:
    """A weight of random codes."""
    shape = (depth // GROUP, columns)
    scales = torch.rand(shape, device="cuda")
    steps = pack_steps(scales, torch.randint(0, 16, shape, device="cuda"), torch.bfloat16)
    return PackedInt4(words(depth // 128, columns, 16).view(torch.int16), steps, depth, GROUP)


def sizes(depth: int, columns: int) -> dict[str, int]:
    """Of a weight, as an engine asks for kernels of it."""
    return {"in_features": depth, "out_features": columns, "group": GROUP}


def operation(depth: int, columns: int) -> Callable[..., Tensor]:
    """What an engine gives to layers of that shape."""
    shape = sizes(depth, columns)
    device = DeviceInfo("cuda", torch.cuda.get_device_capability())
    offer = treadle_kernel_op("int4_linear", KernelRequest(device, "bfloat16", shape))
    if not isinstance(offer, KernelOffer):
        raise SystemExit(f"no kernel for int4_linear here: {offer}")
    return offer.load()


def with_tile(x: Tensor, weight: PackedInt4, tile: Tile | int, tile_counters: Tensor) -> Run:
    arguments = (x, weight.codes, weight.scales, GROUP)
    if isinstance(tile, int):
        multiply = packed_product.multiply_int4
        return partial(multiply, *arguments, tile, tile_counters, num_sms(x.device))
    return partial(kernel.multiply, *arguments, tile, tile_counters, num_sms(x.device))


def row(rows: int, depth: int, columns: int) -> dict[str, float]:
    """Microseconds."""
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    tile_counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    op = operation(depth, columns)
    calls: dict[str, list[Run]] = {}

    def add(name: str, call: Run) -> None:
        calls.setdefault(name, []).append(call)

    for _ in range(max(2, CACHE_BYTES // (depth * columns // 2))):
        weight = packed(depth, columns)
        arguments = (weight.codes, weight.scales, depth, GROUP)
        add("int4_linear", partial(op, x, *arguments))
        add(
            "Triton",
            with_tile(x, weight, choose_tile(rows, columns) or LARGE_M_TILE, tile_counters),
        )
        if packed_product.supports(torch.cuda.get_device_capability(), sizes(depth, columns)):
            levels = packed_product.biased_levels(x.dtype)
            block_m = packed_product.choose_block_m(rows, depth, columns, levels, torch.int32)
            add("Gluon", with_tile(x, weight, block_m or packed_product.BLOCKS[0], tile_counters))
        add("unpacked", lambda g=arguments: F.linear(x, kernel.unpack(*g, x.dtype)))
    for _ in range(max(2, CACHE_BYTES // (2 * depth * columns))):
        dense = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
        add("bfloat16", partial(F.linear, x, dense))
    return microseconds(calls)


def sweep() -> None:
    """The best tiles of a list."""
    tile_counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    own_tiles: tuple[Tile | int, ...] = TILES
    if packed_product.supports(torch.cuda.get_device_capability(), sizes(4096, 4096)):
        own_tiles += packed_product.BLOCKS
    for depth, columns in SHAPES:
        weights = [
            packed(depth, columns) for _ in range(max(2, CACHE_BYTES // (depth * columns // 2)))
        ]
        for rows in ROWS:
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
            results: list[tuple[float, Tile | int]] = []
            for tile in own_tiles:
                block_m = tile if isinstance(tile, int) else tile.block_m
                is_candidate = rows <= block_m < 2 * max(rows, 8) or block_m == 64 <= rows <= 256
                if is_candidate or (isinstance(tile, int) and rows >= block_m):
                    calls = [with_tile(x, weight, tile, tile_counters) for weight in weights]
                    results.append((microseconds({"": calls})[""], tile))
            results.sort(key=lambda pair: pair[0])
            print(f"{depth} x {columns}, {rows} rows")
            for time, tile in results[:6]:
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
