"""Products with weights of 4 and 8 bits in the layout of ``packed_linear`` on one CUDA device, beside bfloat16.

::

    python benchmarks/packed.py [FORMAT …]

Each time, in microseconds, is the median over replays of a CUDA graph that goes through enough weights to keep
them out of L2; what is compared takes turns: cuBLAS in bfloat16, Triton's kernel with its tile at each number of rows,
Hopper's where it serves, and unpacking with cuBLAS. The rules to change are in ``treadle_kernels_triton.packed.tiles`` and
``hopper.packed_product``.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from quantized import CACHE_BYTES, SHAPES, Run, microseconds, words
from torch import Tensor
from treadle_kernels_triton.hopper import packed_product
from treadle_kernels_triton.int4.linear import num_sms
from treadle_kernels_triton.packed import kernel
from treadle_kernels_triton.packed.tiles import tile_of
from treadle_kernels_triton.packed.unpack import unpack

from treadle_layers_kit.packed_layout import E2M1, FP8, INT8, WHOLE, Levels

ROWS = (1, 16, 32, 64, 128, 256, 1024)
HALF, FLOAT, BYTE, SMALL = torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn
Format = tuple[Levels, int, int, torch.dtype | None, bool]
FORMATS: dict[str, Format] = {  # levels, group, run, type of the scales, offsets
    "mxfp4": (E2M1, 32, 32, BYTE, False),
    "nvfp4": (E2M1, 16, 16, SMALL, False),
    "nf4": (E2M1, 64, 32, FLOAT, False),
    "hqq4": (WHOLE, 64, 32, HALF, True),
    "w4g128": (WHOLE, 128, 32, HALF, True),
    "q4_k": (WHOLE, 32, 32, HALF, True),
    "q3_k": (WHOLE, 16, 16, HALF, False),
    "q2_k": (WHOLE, 16, 16, HALF, True),
    "q5_k": (INT8, 32, 32, HALF, True),
    "q6_k": (INT8, 16, 16, HALF, False),
    "int8": (INT8, 0, 64, None, False),
    "int8g32": (INT8, 32, 32, HALF, False),
    "fp8": (FP8, 0, 64, None, False),
    "fp8block": (FP8, 128, 64, FLOAT, False),
}


def weight(name: str, depth: int, columns: int) -> tuple[tuple[Tensor | None, ...], Levels, int]:
    levels, group, run, scale_type, has_offsets = FORMATS[name]
    chunk = run * (2 if isinstance(levels, str) else 4)
    # Bytes of FP8 below the exponents of NaN.
    codes = words(depth // chunk, columns, run // 2) & (0x77777777 if levels == FP8 else -1)
    scales = offsets = None
    if scale_type is not None:
        shape = (depth // group, columns)
        scales = torch.rand(shape, device="cuda") / 8
        scales = scales.to(scale_type) if scale_type is not BYTE else (scales * 80 + 120).to(BYTE)
        offsets = torch.rand(shape, device="cuda").half() if has_offsets else None
    factors = torch.rand(columns, device="cuda")
    return (codes.view(torch.int16), scales, offsets, factors), levels, group or depth


def times(name: str, rows: int, depth: int, columns: int) -> dict[str, float]:
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    tensors, levels, group = weight(name, depth, columns)
    size = sum(t.numel() * t.itemsize for t in tensors if t is not None)
    packed = [weight(name, depth, columns)[0] for _ in range(max(2, CACHE_BYTES // size))]
    count = max(2, CACHE_BYTES // (2 * depth * columns))
    full = [torch.randn(columns, depth, device="cuda", dtype=x.dtype) for _ in range(count)]
    calls: dict[str, list[Run]] = {"bfloat16": [partial(F.linear, x, w) for w in full]}
    scales, offsets = tensors[1:3]
    folds = kernel.folds(scales, offsets, levels, x.dtype)
    tile, sms = tile_of(rows, folds=folds), num_sms(x.device)
    if rows <= 256:
        arguments = levels, group, tile, counters, sms
        calls["kernel"] = [partial(kernel.multiply, x, *w, *arguments) for w in packed]
    scale_type = None if scales is None else scales.dtype
    block_m = packed_product.choose_block_m(rows, depth, columns, levels, scale_type)
    shape = {"in_features": depth, "out_features": columns, "group": group}
    if block_m and packed_product.supports(torch.cuda.get_device_capability(), shape):
        arguments = levels, group, block_m, counters, sms
        calls["Gluon"] = [partial(packed_product.multiply, x, *w, *arguments) for w in packed]
    if rows >= 64:
        unpacked = partial(unpack, in_features=depth, group=group, dtype=x.dtype)
        calls["unpacked"] = [
            partial(lambda w: F.linear(x, unpacked(*w, levels)), w) for w in packed
        ]
    return microseconds(calls)


def main() -> None:
    print(torch.cuda.get_device_name(), "us for", ", ".join(f"{d}x{c}" for d, c in SHAPES))
    for name in sys.argv[1:] or FORMATS:
        for rows in ROWS:
            cells = [times(name, rows, *shape) for shape in SHAPES]
            kinds = "  ".join(
                f"{kind} " + " ".join(f"{cell[kind]:.1f}" for cell in cells) for kind in cells[0]
            )
            print(f"{name:9} {rows:4} {kinds}", flush=True)


if __name__ == "__main__":
    main()
