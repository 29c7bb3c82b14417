"""Products with 4-bit weights on one CUDA device: the kernel, a kernel that unpacks first, bfloat16.

::

    python benchmarks/quantized.py

Each time is the median over replays of a CUDA graph that goes through enough weights to keep them out
of L2. The number of rows from which unpacking wins is what ``MOST_ROWS`` of the plugins should be.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from weft_awq.kernel import awq_gemm, awq_unpack
from weft_gptq.kernel import gptq_gemm, gptq_unpack

SHAPES = ((4096, 4096), (4096, 24576), (12288, 4096))  # in, out: of Qwen3-8B
ROWS = (1, 8, 16, 32, 64, 128, 256)
GROUP = 128
COLD = 256 << 20  # bytes of weights in rotation


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


def row(rows: int, depth: int, columns: int) -> list[float]:
    """Microseconds: awq kernel, awq unpacked, gptq kernel, gptq unpacked, bfloat16."""
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    shape = (depth // GROUP, columns)
    made: list[list[Callable[[], object]]] = [[] for _ in range(5)]
    for _ in range(max(2, COLD // (depth * columns // 2))):
        scales = torch.rand(shape, device="cuda", dtype=torch.bfloat16)
        zeros = torch.randint(0, 16, shape, device="cuda").to(torch.bfloat16)
        a = (words(depth, columns // 8), scales, zeros, GROUP)
        g = (words(depth // 8, columns), scales, zeros, 4, GROUP, None)
        made[0].append(lambda a=a: awq_gemm(x, *a))
        made[1].append(lambda a=a: x @ awq_unpack(*a, x.dtype))
        made[2].append(lambda g=g: gptq_gemm(x, *g))
        made[3].append(lambda g=g: x @ gptq_unpack(*g, x.dtype))
    for _ in range(max(2, COLD // (2 * depth * columns))):
        dense = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
        made[4].append(lambda w=dense: torch.nn.functional.linear(x, w))
    return [1e6 * seconds(runs) for runs in made]


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    print(f"{'in x out':>14} {'rows':>5}   awq kernel  unpacked   gptq kernel  unpacked   bfloat16")
    for depth, columns in SHAPES:
        for rows in ROWS:
            a, b, c, d, e = row(rows, depth, columns)
            size = f"{depth} x {columns}"
            print(
                f"{size:>14} {rows:>5} {a:12.1f} {b:9.1f} {c:13.1f} {d:9.1f} {e:10.1f}", flush=True
            )


if __name__ == "__main__":
    main()
