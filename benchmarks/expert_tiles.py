"""Tiles of the products with all experts of a layer, in FP8 and int8, on one CUDA device.

::

    python benchmarks/expert_tiles.py [SHAPE …] [--kind KIND …] [--tokens N …]

Each line is a product: the microseconds of the tile that is chosen, and those of the best ones. They are medians over replays of
a CUDA graph, whose calls chose different experts; choices are sorted and activations rounded beforehand. The rule to
change is ``treadle_fp8_kit.tiles.choose_experts_tile``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from experts import SHAPES, TOKENS, choices
from kernels import seconds
from torch import Tensor

from treadle_fp8_kit.kernels import multiply, plan
from treadle_fp8_kit.quantize import FP8, INT8
from treadle_fp8_kit.quantize_kernel import quantize_per_block, quantize_per_row
from treadle_fp8_kit.tiles import BLOCK, Tile, choose_experts_tile
from treadle_triton_kit.compile_ahead import CompileAhead

KINDS = {"rows": FP8, "blocks": FP8, "int8": INT8}


@dataclass
class Product:
    """Random matrices of all experts of a shape."""

    shape: str
    name: str
    kind: str

    def __post_init__(self) -> None:
        self.experts, self.k, hidden, inner = SHAPES[self.shape]
        is_down = self.name == "down"
        self.width, self.depth = (hidden, inner) if is_down else (2 * inner, hidden)
        size = (self.experts, self.width, self.depth)
        bits = torch.randint(0x70, size, device="cuda", dtype=torch.int8)
        self.weight = bits.view(KINDS[self.kind])
        blocks = (self.width // BLOCK, self.depth // BLOCK)
        scales = blocks if self.kind == "blocks" else (self.width,)
        self.scale = torch.rand(self.experts, *scales, device="cuda")

    def rounded(self, tokens: int) -> tuple[Tensor, Tensor]:
        rows = tokens * self.k if self.name == "down" else tokens
        x = torch.randn(rows, self.depth, device="cuda", dtype=torch.bfloat16)
        if self.kind == "blocks":
            return quantize_per_block(x, rows, use_pdl=True)
        return quantize_per_row(x, None, None, rows, dtype=self.weight.dtype, use_pdl=True)

    def tiles(self, tokens: int) -> list[Tile]:
        is_by_block = self.kind == "blocks"
        chosen = choose_experts_tile(tokens, self.k, self.experts, has_block_scales=is_by_block)
        others = candidates(tokens * self.k / self.experts)
        fitting = [t for t in others if t.block_k == BLOCK or not is_by_block]
        return [chosen, *(tile for tile in fitting if tile != chosen)]

    def time(self, tokens: int, tile: Tile, *, is_collecting: bool = False) -> float:
        """Microseconds, or 0."""
        calls = [
            partial(
                multiply, *self.rounded(tokens), self.weight, self.scale, None, torch.bfloat16, tile, use_pdl=True,
                grouping=plan(choices(tokens, self.shape), self.experts, tile.block_m),
            )
            for _ in range(1 if is_collecting else 4)
        ]  # fmt: skip
        if is_collecting:
            calls[0]()
            return 0.0
        return 1e6 * seconds(calls, 0.01)


def candidates(mean: float) -> Iterator[Tile]:
    """For so many rows of an expert."""
    for block_m in 16, 32, 64, 128, 256:
        if not min(mean, 64) <= block_m <= max(4 * mean, 16):
            continue
        small = ((64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 4), (128, 128, 4, 4))
        middle = ((64, 128, 4, 5), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4))
        large = ((64, 128, 4, 4), (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 4, 4))
        largest = ((128, 128, 8, 3),)
        sizes = {16: small, 32: small, 64: middle, 128: large, 256: largest}
        for block_n, block_k, warps, stages in sizes[block_m]:
            for group_m in (1, 8, 16) if block_m >= 128 and warps == 8 else (8,):
                yield Tile(block_n, block_m, block_k, warps, stages, group_m=group_m)


def text(tile: Tile) -> str:
    sizes = (tile.block_n, tile.block_m, tile.block_k, tile.num_warps)
    return str((*sizes, tile.num_stages, tile.group_m))


def products(shapes: list[str], kinds: list[str]) -> Iterator[Product]:
    for shape in shapes:
        for name in "gate_up", "down":
            for kind in kinds:
                yield Product(shape, name, kind)


def compile_all(shapes: list[str], kinds: list[str], numbers: list[int]) -> None:
    ahead = CompileAhead()
    ahead.open()
    with ahead.collecting():
        for product in products(shapes, kinds):
            for tokens in numbers:
                for tile in product.tiles(tokens):
                    product.time(tokens, tile, is_collecting=True)
    ahead.wait()
    ahead.close()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="*", help=", ".join(SHAPES))
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds", flush=True)
    shapes, kinds, numbers = options.shape or list(SHAPES), options.kind, options.tokens
    compile_all(shapes, kinds, numbers)
    for shape in shapes:
        experts = SHAPES[shape][0]
        for tokens in numbers:
            ids = choices(tokens, shape)
            times = [1e6 * seconds([partial(plan, ids, experts, m)] * 4) for m in (16, 128)]
            print(f"{shape:>15} sorting {tokens:>6} " + " ".join(f"{t:.1f}" for t in times))
    for product in products(shapes, kinds):
        for tokens in numbers:
            times_of = {}
            for tile in product.tiles(tokens):
                try:
                    times_of[tile] = product.time(tokens, tile)
                except Exception as error:  # what does not fit into shared memory, for example
                    print("no", text(tile), error)
            chosen, *_ = times_of
            best = sorted(times_of, key=times_of.__getitem__)[:3]
            found = "; ".join(f"{times_of[tile]:.1f} {text(tile)}" for tile in best)
            head = f"{product.shape:>15} {product.name:>8} {product.kind:>7} {tokens:>6}"
            print(f"{head} {times_of[chosen]:8.1f} {text(chosen)}: {found}", flush=True)


if __name__ == "__main__":
    main()
