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
from treadle_kernels_triton.hopper.gated import DEFERRED, TURNS, GatedLinear, create_gated_linear
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
FEW = [Tile(f, d, 4) for f, d in ((2, 2048), (4, 1024), (8, 512), (2, 4096), (4, 2048), (8, 1024))]
FEW += [Tile(f, d, 8) for f, d in ((2, 4096), (4, 2048), (8, 1024), (4, 4096), (16, 1024))]
VOCAB = 151936
COLD = 400 << 20


def seconds(calls: Sequence[Callable[[], object]], budget: float = 0.03) -> float:
    """Seconds of one of the calls: the median over replays of a graph that holds all of them."""

    def run() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
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


def copies(*shape: int, most: int = 64) -> list[Tensor]:
    """As many tensors as it takes to be out of every cache."""
    size = 2 * torch.Size(shape).numel()
    one = normal(*shape) * 0.05
    return [one.clone() for _ in range(max(2, min(most, COLD // size)))]


def loaded(op: str, features: int, depth: int, dtype: str = "bfloat16") -> Callable[..., Tensor]:
    """A linear of the plugin as a layer gets it."""
    device = DeviceInfo("cuda", torch.cuda.get_device_capability())
    shape = {"in_features": depth, "out_features": features}
    return kernels.load(op, KernelRequest(device, dtype, shape))


def add_and_norm(y: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """What follows a linear layer, whose result may be in parts."""
    op = fused_add_rms_norm if y.dim() == residual.dim() else fused_add_partials_rms_norm
    return op(y, residual, gain, 1e-6, early=True)


def product_and_norm(
    product: Callable[..., Tensor], x: Tensor, w: Tensor, residual: Tensor, gain: Tensor
) -> None:
    add_and_norm(product(x, w, None), residual, gain)


def gated_product(dtype: str) -> GatedLinear | None:
    """As ``load`` of the plugin's linears does it."""
    return create_gated_linear(dtype) if torch.cuda.get_device_capability()[0] == 9 else None


# --------------------------------------------------------------------------------- parity


def error(got: Tensor, want: Tensor) -> float:
    off = float((got.double() - want.double()).norm() / want.double().norm())
    return off if off == off else float("inf")


def chain(rows: int, depth: int, inner: int) -> float:
    """Norm, linear, norm, gated linear, linear; replayed with other inputs."""
    early = True
    x, residual, gain = normal(rows, depth), normal(rows, depth), normal(depth)
    w = [normal(n, k) * k**-0.5 for n, k in ((depth, depth), (2 * inner, depth), (depth, inner))]
    first, last = (loaded("linear_split_k", *weight.shape) for weight in (w[0], w[2]))
    gated = loaded("linear_silu_and_mul", *w[1].shape)

    def layers(a: Tensor, b: Tensor) -> Tensor:
        y = rms_norm(a, gain, 1e-6, early=early)
        y, b = add_and_norm(first(y, w[0], None), b.clone(), gain)
        y = last(gated(y, w[1], None), w[2], None)
        return add_and_norm(y, b, gain)[0]

    layers(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(x, residual)
    worst = 0.0
    for _ in range(20):
        x.normal_()
        residual.normal_()
        out.fill_(float("nan"))
        graph.replay()
        a, b, g, v = x.double(), residual.double(), gain.double(), [t.double() for t in w]
        b = F.linear(ops.rms_norm(a, g, 1e-6), v[0]) + b
        y = F.linear(ops.silu_and_mul(F.linear(ops.rms_norm(b, g, 1e-6), v[1])), v[2])
        worst = max(worst, error(out, ops.rms_norm(y + b, g, 1e-6)))
    return worst


def parity() -> int:
    faults = 0

    def verdict(name: str, found: float, limit: float) -> None:
        nonlocal faults
        faults += not found <= limit
        print(f"  {name:44} {found:.1e} {'ok' if found <= limit else 'WRONG'}", flush=True)

    for dtype in (torch.bfloat16, torch.float16):
        for gated, tile in itertools.product((False, True), FEW[:3]):
            worst = 0.0
            for rows in (1,) if gated else (1, 2, 3, 4):
                x, w = normal(rows, 1536, dtype=dtype), normal(1000, 1536, dtype=dtype)
                bias = normal(1000, dtype=dtype)
                got = kernels.small_linear(x, w, bias, gated, tile, True)
                want = F.linear(x.double(), w.double(), bias.double())
                worst = max(worst, error(got, ops.silu_and_mul(want) if gated else want))
            verdict(f"{dtype} {'silu_' * gated}linear {tile.features}x{tile.depth}", worst, 1e-2)
        product = gated_product(str(dtype).removeprefix("torch."))
        for variant, rows in itertools.product((TURNS, DEFERRED) if product else (), (300, 2500)):
            x, w = normal(rows, 1032, dtype=dtype), normal(6160, 1032, dtype=dtype)
            want = ops.silu_and_mul(F.linear(x.double(), w.double()))
            worst = error(product.forward(x, w, variant), want)
            verdict(f"{dtype} linear_silu_and_mul, {rows} rows, turns {variant.turns}", worst, 1e-2)
    for rows in (1, 3, 4, 5, 17, 40, 100, 200, 256, 300):
        verdict(f"a chain of kernels, {rows} rows", chain(rows, 2048, 2048), 1e-2)
    sampler, slots = opened(512)
    logits = normal(512, VOCAB) * 3
    features = sampler.features(list(range(512)))
    assert features is not None
    want = sampler.sample_graphable(logits, slots, slots + 9, features)[0]
    sampler.sample_op = partial(sample, early=True)
    got = sampler.sample_graphable(logits, slots, slots + 9, features)[0]
    verdict("sample: share of other tokens than torch's", float((got != want).float().mean()), 4e-3)
    best = argmax(logits, early=True)[0]
    verdict("argmax: other tokens", float((best != logits.max(-1).indices).sum()), 0.0)
    return faults


def opened(rows: int) -> tuple[Sampler, Tensor]:
    sampler = Sampler(rows, VOCAB, "cuda")
    params = SamplingParams(temperature=0.6)
    sampler.add_sequences(
        [NewSequenceData(s, params, 1, [1], 7919 * s, [0], []) for s in range(rows)]
    )
    return sampler, torch.arange(rows, device="cuda")


# ----------------------------------------------------------------------------------- time


def line(name: str, ours: float, theirs: float, moved: float, ceiling: float) -> None:
    share = 100 * moved / ours / ceiling
    print(
        f"{name:34} {ours * 1e6:8.2f} us  torch {theirs * 1e6:8.2f} us  share {share:5.1f} %",
        flush=True,
    )


def torch_linear(gated: bool, x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return silu_and_mul(y) if gated else y


def report(ceiling: float) -> None:
    for name, features, depth, gated in LINEARS:
        weights = copies(features, depth)
        ours = loaded("linear_silu_and_mul" if gated else "linear", features, depth)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, *((1024, 8192) if gated else ())):
            x = normal(rows, depth)
            mine = seconds([partial(ours, x, w, None) for w in weights])
            theirs = seconds([partial(torch_linear, gated, x, w) for w in weights])
            line(f"{name} {rows} rows", mine, theirs, 2 * features * depth, ceiling)
        if name.endswith(("o", "down")):
            with_norm(name, weights, ceiling)
    for rows in (1, 32, 256, 8192):
        xs, gain = copies(rows, 1024), normal(1024)
        mine = seconds([partial(fused_add_rms_norm, x, x, gain, 1e-6, early=True) for x in xs])
        theirs = seconds([partial(ops.fused_add_rms_norm, x, x, gain, 1e-6) for x in xs])
        line(f"fused_add_rms_norm 1024, {rows} rows", mine, theirs, 6 * rows * 1024, ceiling)
        xs = copies(rows, 6144)
        mine = seconds([partial(silu_and_mul, x, early=True) for x in xs])
        theirs = seconds([partial(ops.silu_and_mul, x) for x in xs])
        line(f"silu_and_mul 3072, {rows} rows", mine, theirs, 6 * rows * 3072, ceiling)
    rotary(ceiling)
    for rows in (1, 32, 128, 256):
        sampler, slots = opened(rows)
        logits = copies(rows, VOCAB, most=16)
        features = sampler.features(list(range(rows)))
        assert features is not None
        times = []
        for op in (partial(sample, early=True), None):
            sampler.sample_op = op
            run = partial(sampler.sample_graphable, slots=slots, positions=slots, features=features)
            times.append(seconds([partial(run, x) for x in logits]))
        line(f"sample, {rows} rows", times[0], times[1], 2 * rows * VOCAB, ceiling)
        mine = seconds([partial(argmax, x, early=True) for x in logits])
        theirs = seconds([partial(x.max, -1) for x in logits])
        line(f"argmax, {rows} rows", mine, theirs, 2 * rows * VOCAB, ceiling)


def with_norm(name: str, weights: list[Tensor], ceiling: float) -> None:
    """A linear layer and the norm that follows it; beside torch's linear and the same norm."""
    features, depth = weights[0].shape
    ours, gain = loaded("linear_split_k", features, depth), normal(features)
    for rows in (1, 8, 32, 64, 128, 192, 256):
        x, residual = normal(rows, depth), normal(rows, features)
        times = [
            seconds([partial(product_and_norm, product, x, w, residual, gain) for w in weights])
            for product in (ours, F.linear)
        ]
        line(f"{name} and norm {rows} rows", *times, 2 * features * depth, ceiling)


def rotary(ceiling: float) -> None:
    for rows in (1, 32, 256, 8192):
        qkvs = copies(rows, 4096, most=32)
        cos, norms = normal(rows, 1, 128), (normal(128), normal(128), 1e-6, 0.0)
        cache = torch.zeros(2, 16384, 8, 128, dtype=torch.bfloat16, device="cuda")
        slots = torch.randperm(16384, device="cuda")[:rows]
        found = []
        for tile in (None, (1, 1), (2, 1), (4, 2), (8, 2), (8, 4)):
            run = partial(rope_and_cache, cos=cos, sin=cos, norms=norms, cache=cache, slots=slots)
            took = seconds([partial(run, x, tile=tile, early=True) for x in qkvs])
            found.append(f"{tile}: {took * 1e6:.2f}")
        print(
            f"rope_and_cache, {rows} rows, by (heads, warps) in us: " + "  ".join(found),
            flush=True,
        )
        took = 2 * 2 * rows * 4096 / ceiling
        print(f"    the bytes alone: {took * 1e6:.2f} us")


# ---------------------------------------------------------------------------------- sweep


def variants() -> list[tuple[int, bool, Tile]]:
    return [(1, True, tile) for tile in FEW] + [(n, False, tile) for n in (1, 2, 4) for tile in FEW]


def build(part: list[tuple[int, bool, Tile]]) -> None:
    """Compile variants into Triton's cache."""
    for rows, gated, tile in part:
        for depth in (1024, 2048, 3072, 4096, 12288):
            x, w = normal(rows, depth), normal(4096, depth)
            kernels.small_linear(x, w, None, gated, tile, True)


def sweep(ceiling: float) -> None:
    for name, features, depth, gated in LINEARS:
        weights = copies(features, depth)
        for rows in (1,) if gated else (1, 2, 4):
            x = normal(rows, depth)
            theirs = seconds([partial(torch_linear, gated, x, w) for w in weights])
            found = []
            for tile in FEW:
                run = partial(kernels.small_linear, bias=None, gated=gated, tile=tile, early=True)
                took = seconds([partial(run, x, w) for w in weights], 0.01)
                found.append((took, tile))
            found.sort(key=lambda pair: pair[0])
            text = "  ".join(
                f"{t.features}x{t.depth}/{t.warps}w: {took * 1e6:.1f}" for took, t in found
            )
            share = 200 * features * depth / found[0][0] / ceiling
            print(
                f"{name:13} {rows:2} rows torch {theirs * 1e6:6.1f} us, best {share:4.1f} %, {text}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("parity", "time", "sweep"):
        parser.add_argument(f"--{name}", action="store_true")
    chosen = parser.parse_args()
    everything = not (chosen.parity or chosen.time or chosen.sweep)
    if chosen.sweep:  # before this process touches the device
        made, workers = variants(), 12
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            pool.map(build, [made[i::workers] for i in range(workers)])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    faults = parity() if chosen.parity or everything else 0
    ceiling = copy_bandwidth()
    print(f"copy {ceiling / 1e12:.2f} TB/s")
    if chosen.time or everything:
        report(ceiling)
    if chosen.sweep:
        sweep(ceiling)
    return faults


if __name__ == "__main__":
    raise SystemExit(main())
