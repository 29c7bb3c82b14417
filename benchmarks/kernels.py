"""The fused kernels on one CUDA device: are they right, and how near the ceiling are they?

::

    PYTHONPATH=core:kits/triton:plugins/backends/kernels/triton python benchmarks/kernels.py [--parity|--time|--sweep]

First every kernel, with its early start, against float64, fresh numbers in every replay of a captured
chain, over poisoned outputs. Then times: the median of replays of a graph that holds many calls, each
over memory of its own, so that nothing is read from L2 that a model would read from memory. ``share``
is that of the copy bandwidth that the bytes which must move would come to; ``torch`` is the layers'
own operation. ``--sweep`` times linears with many tiles, to choose those of ``treadle_kernels_triton.tiles``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from treadle_kernels_triton import linear as kernels
from treadle_kernels_triton.activation import silu_and_mul
from treadle_kernels_triton.hopper.gated_linear import (
    COOPERATIVE,
    PINGPONG,
    GatedLinear,
    create_gated_linear,
)
from treadle_kernels_triton.norm import fused_add_partials_rms_norm, fused_add_rms_norm, rms_norm
from treadle_kernels_triton.rotary import rope_and_cache
from treadle_kernels_triton.sample import argmax, sample
from treadle_kernels_triton.tiles import Tile

from treadle.api.cache import DeviceInfo
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.api.types import KernelRequest
from treadle.sampling.sampler import Sampler
from treadle_layers_kit import ops

# (name, features, depth, gated) of the linears of Qwen3-0.6B and Qwen3-8B
LINEARS = (
    ("0.6B qkv", 4096, 1024, False),
    ("0.6B o", 1024, 2048, False),
    ("0.6B gate_up", 6144, 1024, True),
    ("0.6B down", 1024, 3072, False),
    ("8B qkv", 6144, 4096, False),
    ("8B o", 4096, 4096, False),
    ("8B gate_up", 24576, 4096, True),
    ("8B down", 4096, 12288, False),
)
TILES = [
    Tile(f, d, 4) for f, d in ((2, 2048), (4, 1024), (8, 512), (2, 4096), (4, 2048), (8, 1024))
]
TILES += [Tile(f, d, 8) for f, d in ((2, 4096), (4, 2048), (8, 1024), (4, 4096), (16, 1024))]
VOCAB = 151936
CACHE_BYTES = 400 << 20


def seconds(calls: Sequence[Callable[[], object]], budget: float = 0.03) -> float:
    """Seconds of one of the calls: the median over replays of a graph that holds all of them."""

    def run() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    while sum(times) < budget or len(times) < 7:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:]) / len(calls)


def copy_bandwidth() -> float:
    x = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_(0, 255)
    y = torch.empty_like(x)
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        y.copy_(x)  # not in a graph, where it would be left to the copy engine
        end.record()
        end.synchronize()
    return 2e3 * len(x) / begin.elapsed_time(end)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def copies(*shape: int, max_copies: int = 64) -> list[Tensor]:
    """As many tensors as it takes to be out of every cache."""
    size = 2 * torch.Size(shape).numel()
    tensor = normal(*shape) * 0.05
    return [tensor.clone() for _ in range(max(2, min(max_copies, CACHE_BYTES // size)))]


def loaded(op: str, features: int, depth: int, dtype: str = "bfloat16") -> Callable[..., Tensor]:
    """A linear of the plugin as a layer gets it."""
    device = DeviceInfo("cuda", torch.cuda.get_device_capability())
    shape = {"in_features": depth, "out_features": features}
    return kernels.load(op, KernelRequest(device, dtype, shape))


def add_and_norm(y: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """What follows a linear layer, whose result may be in parts."""
    op = fused_add_rms_norm if y.dim() == residual.dim() else fused_add_partials_rms_norm
    return op(y, residual, gain, 1e-6, use_pdl=True)


def product_and_norm(
    product: Callable[..., Tensor], x: Tensor, w: Tensor, residual: Tensor, gain: Tensor
) -> None:
    add_and_norm(product(x, w, None), residual, gain)


def gated_product(dtype: str) -> GatedLinear | None:
    """As ``load`` of the plugin's linears does it."""
    return create_gated_linear(dtype) if torch.cuda.get_device_capability()[0] == 9 else None


# --------------------------------------------------------------------------------- parity


def error(actual: Tensor, expected: Tensor) -> float:
    relative_error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return relative_error if relative_error == relative_error else float("inf")


def chain(rows: int, depth: int, intermediate: int) -> float:
    """Norm, linear, norm, gated linear, linear; replayed with other inputs."""
    use_pdl = True
    x, residual, gain = normal(rows, depth), normal(rows, depth), normal(depth)
    w = [
        normal(n, k) * k**-0.5
        for n, k in ((depth, depth), (2 * intermediate, depth), (depth, intermediate))
    ]
    first, last = (loaded("linear_split_k", *weight.shape) for weight in (w[0], w[2]))
    gated = loaded("linear_silu_and_mul", *w[1].shape)

    def layers(a: Tensor, b: Tensor) -> Tensor:
        y = rms_norm(a, gain, 1e-6, use_pdl=use_pdl)
        y, b = add_and_norm(first(y, w[0], None), b.clone(), gain)
        y = last(gated(y, w[1], None), w[2], None)
        return add_and_norm(y, b, gain)[0]

    layers(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(x, residual)
    max_error = 0.0
    for _ in range(20):
        x.normal_()
        residual.normal_()
        out.fill_(float("nan"))
        graph.replay()
        a, b, g, v = x.double(), residual.double(), gain.double(), [t.double() for t in w]
        b = F.linear(ops.rms_norm(a, g, 1e-6), v[0]) + b
        y = F.linear(ops.silu_and_mul(F.linear(ops.rms_norm(b, g, 1e-6), v[1])), v[2])
        max_error = max(max_error, error(out, ops.rms_norm(y + b, g, 1e-6)))
    return max_error


def parity() -> int:
    faults = 0

    def verdict(name: str, value: float, limit: float) -> None:
        nonlocal faults
        faults += not value <= limit
        print(f"  {name:44} {value:.1e} {'ok' if value <= limit else 'WRONG'}", flush=True)

    for dtype in (torch.bfloat16, torch.float16):
        for gated, tile in itertools.product((False, True), TILES[:3]):
            max_error = 0.0
            for rows in (1,) if gated else (1, 2, 3, 4):
                x, w = normal(rows, 1536, dtype=dtype), normal(1000, 1536, dtype=dtype)
                bias = normal(1000, dtype=dtype)
                actual = kernels.small_linear(x, w, bias, gated, tile, True)
                expected = F.linear(x.double(), w.double(), bias.double())
                max_error = max(
                    max_error, error(actual, ops.silu_and_mul(expected) if gated else expected)
                )
            verdict(
                f"{dtype} {'silu_' * gated}linear {tile.block_n}x{tile.block_k}", max_error, 1e-2
            )
        product = gated_product(str(dtype).removeprefix("torch."))
        for variant, rows in itertools.product(
            (PINGPONG, COOPERATIVE) if product else (), (300, 2500)
        ):
            x, w = normal(rows, 1032, dtype=dtype), normal(6160, 1032, dtype=dtype)
            expected = ops.silu_and_mul(F.linear(x.double(), w.double()))
            max_error = error(product.forward(x, w, variant), expected)
            verdict(
                f"{dtype} linear_silu_and_mul, {rows} rows, pingpong {variant.pingpong}",
                max_error,
                1e-2,
            )
    for rows in (1, 3, 4, 5, 17, 40, 100, 200, 256, 300):
        verdict(f"a chain of kernels, {rows} rows", chain(rows, 2048, 2048), 1e-2)
    sampler, slots = create_sampler(512)
    logits = normal(512, VOCAB) * 3
    features = sampler.features(list(range(512)))
    assert features is not None
    expected = sampler.sample_graphable(logits, slots, slots + 9, features)[0]
    sampler.sample_op = partial(sample, use_pdl=True)
    actual = sampler.sample_graphable(logits, slots, slots + 9, features)[0]
    verdict(
        "sample: share of other tokens than torch's",
        float((actual != expected).float().mean()),
        4e-3,
    )
    token_ids = argmax(logits, use_pdl=True)[0]
    verdict("argmax: other tokens", float((token_ids != logits.max(-1).indices).sum()), 0.0)
    return faults


def create_sampler(rows: int) -> tuple[Sampler, Tensor]:
    sampler = Sampler(rows, VOCAB, "cuda")
    params = SamplingParams(temperature=0.6)
    sampler.add_sequences(
        [NewSequenceData(s, params, 1, [1], 7919 * s, [0], []) for s in range(rows)]
    )
    return sampler, torch.arange(rows, device="cuda")


# ----------------------------------------------------------------------------------- time


def line(name: str, kernel_s: float, torch_s: float, num_bytes: float, ceiling: float) -> None:
    bandwidth_share = 100 * num_bytes / kernel_s / ceiling
    print(
        f"{name:34} {kernel_s * 1e6:8.2f} us  torch {torch_s * 1e6:8.2f} us  share {bandwidth_share:5.1f} %",
        flush=True,
    )


def torch_linear(gated: bool, x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return silu_and_mul(y) if gated else y


def report(ceiling: float) -> None:
    for name, features, depth, gated in LINEARS:
        weights = copies(features, depth)
        kernel = loaded("linear_silu_and_mul" if gated else "linear", features, depth)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, *((1024, 8192) if gated else ())):
            x = normal(rows, depth)
            kernel_s = seconds([partial(kernel, x, w, None) for w in weights])
            torch_s = seconds([partial(torch_linear, gated, x, w) for w in weights])
            line(f"{name} {rows} rows", kernel_s, torch_s, 2 * features * depth, ceiling)
        if name.endswith(("o", "down")):
            with_norm(name, weights, ceiling)
    for rows in (1, 32, 256, 8192):
        xs, gain = copies(rows, 1024), normal(1024)
        kernel_s = seconds(
            [partial(fused_add_rms_norm, x, x, gain, 1e-6, use_pdl=True) for x in xs]
        )
        torch_s = seconds([partial(ops.fused_add_rms_norm, x, x, gain, 1e-6) for x in xs])
        line(f"fused_add_rms_norm 1024, {rows} rows", kernel_s, torch_s, 6 * rows * 1024, ceiling)
        xs = copies(rows, 6144)
        kernel_s = seconds([partial(silu_and_mul, x, use_pdl=True) for x in xs])
        torch_s = seconds([partial(ops.silu_and_mul, x) for x in xs])
        line(f"silu_and_mul 3072, {rows} rows", kernel_s, torch_s, 6 * rows * 3072, ceiling)
    rotary(ceiling)
    for rows in (1, 32, 128, 256):
        sampler, slots = create_sampler(rows)
        logits = copies(rows, VOCAB, max_copies=16)
        features = sampler.features(list(range(rows)))
        assert features is not None
        times = []
        for op in (partial(sample, use_pdl=True), None):
            sampler.sample_op = op
            call = partial(
                sampler.sample_graphable, slots=slots, positions=slots, features=features
            )
            times.append(seconds([partial(call, x) for x in logits]))
        line(f"sample, {rows} rows", times[0], times[1], 2 * rows * VOCAB, ceiling)
        kernel_s = seconds([partial(argmax, x, use_pdl=True) for x in logits])
        torch_s = seconds([partial(x.max, -1) for x in logits])
        line(f"argmax, {rows} rows", kernel_s, torch_s, 2 * rows * VOCAB, ceiling)


def with_norm(name: str, weights: list[Tensor], ceiling: float) -> None:
    """A linear layer and the norm that follows it; beside torch's linear and the same norm."""
    features, depth = weights[0].shape
    kernel, gain = loaded("linear_split_k", features, depth), normal(features)
    for rows in (1, 8, 32, 64, 128, 192, 256):
        x, residual = normal(rows, depth), normal(rows, features)
        times = [
            seconds([partial(product_and_norm, product, x, w, residual, gain) for w in weights])
            for product in (kernel, F.linear)
        ]
        line(f"{name} and norm {rows} rows", *times, 2 * features * depth, ceiling)


def rotary(ceiling: float) -> None:
    for rows in (1, 32, 256, 8192):
        qkvs = copies(rows, 4096, max_copies=32)
        cos, norms = normal(rows, 1, 128), (normal(128), normal(128), 1e-6, 0.0)
        cache = torch.zeros(2, 16384, 8, 128, dtype=torch.bfloat16, device="cuda")
        slots = torch.randperm(16384, device="cuda")[:rows]
        results = []
        for tile in (None, (1, 1), (2, 1), (4, 2), (8, 2), (8, 4)):
            call = partial(rope_and_cache, cos=cos, sin=cos, norms=norms, cache=cache, slots=slots)
            elapsed = seconds([partial(call, x, tile=tile, use_pdl=True) for x in qkvs])
            results.append(f"{tile}: {elapsed * 1e6:.2f}")
        print(
            f"rope_and_cache, {rows} rows, by (heads, warps) in us: " + "  ".join(results),
            flush=True,
        )
        elapsed = 2 * 2 * rows * 4096 / ceiling
        print(f"    the bytes alone: {elapsed * 1e6:.2f} us")


# ---------------------------------------------------------------------------------- sweep


def variants() -> list[tuple[int, bool, Tile]]:
    return [(1, True, tile) for tile in TILES] + [
        (n, False, tile) for n in (1, 2, 4) for tile in TILES
    ]


def build(jobs: list[tuple[int, bool, Tile]]) -> None:
    """Compile variants into Triton's cache."""
    for rows, gated, tile in jobs:
        for depth in (1024, 2048, 3072, 4096, 12288):
            x, w = normal(rows, depth), normal(4096, depth)
            kernels.small_linear(x, w, None, gated, tile, True)


def sweep(ceiling: float) -> None:
    for name, features, depth, gated in LINEARS:
        weights = copies(features, depth)
        for rows in (1,) if gated else (1, 2, 4):
            x = normal(rows, depth)
            torch_s = seconds([partial(torch_linear, gated, x, w) for w in weights])
            results = []
            for tile in TILES:
                call = partial(
                    kernels.small_linear, bias=None, gated=gated, tile=tile, use_pdl=True
                )
                elapsed = seconds([partial(call, x, w) for w in weights], 0.01)
                results.append((elapsed, tile))
            results.sort(key=lambda pair: pair[0])
            text = "  ".join(
                f"{t.block_n}x{t.block_k}/{t.num_warps}w: {elapsed * 1e6:.1f}"
                for elapsed, t in results
            )
            bandwidth_share = 200 * features * depth / results[0][0] / ceiling
            print(
                f"{name:13} {rows:2} rows torch {torch_s * 1e6:6.1f} us, best {bandwidth_share:4.1f} %, {text}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("parity", "time", "sweep"):
        parser.add_argument(f"--{name}", action="store_true")
    arguments = parser.parse_args()
    run_all = not (arguments.parity or arguments.time or arguments.sweep)
    if arguments.sweep:  # before this process touches the device
        jobs, workers = variants(), 12
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            pool.map(build, [jobs[i::workers] for i in range(workers)])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    faults = parity() if arguments.parity or run_all else 0
    ceiling = copy_bandwidth()
    print(f"copy {ceiling / 1e12:.2f} TB/s")
    if arguments.time or run_all:
        report(ceiling)
    if arguments.sweep:
        sweep(ceiling)
    return faults


if __name__ == "__main__":
    raise SystemExit(main())
