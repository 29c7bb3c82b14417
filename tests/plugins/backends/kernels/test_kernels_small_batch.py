"""Products of decode batches on Hopper: which rows get them, their code; on a card, their results."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton.experimental.gluon")

import treadle_kernels_triton
from treadle_kernels_triton.hopper import small_batch as module
from treadle_kernels_triton.hopper.small_batch import (
    SmallBatchLinear,
    TileConfig,
    choose_gated_tile_config,
    choose_tile_config,
    create_small_batch_linear,
)
from treadle_kernels_triton.linear import silu_and_mul

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest

# Of Qwen3-0.6B and 8B: features and depth, and what the rule gives from which number of rows on.
QKV, OUT, DOWN = (4096, 1024), (1024, 2048), (1024, 3072)
BIG_QKV, BIG_OUT, BIG_DOWN = (6144, 4096), (4096, 4096), (4096, 12288)
GATE, BIG_GATE = (6144, 1024), (24576, 4096)
HALF_QKV, HALF_OUT, HALF_DOWN, HALF_GATE = (3072, 4096), (4096, 2048), (4096, 6144), (12288, 4096)
NARROW = {2: TileConfig(1, 64, 4), 65: TileConfig(1, 128, 4)}
MEASURED: dict[tuple[int, int], dict[int, TileConfig | None]] = {
    QKV: {2: TileConfig(1, 64), 129: TileConfig(1, 128)},
    OUT: NARROW,
    DOWN: NARROW,
    BIG_QKV: {
        2: TileConfig(1, 64),
        65: None,
        161: TileConfig(2, 128),
        177: None,
        209: TileConfig(2, 128),
        241: None,
    },
    BIG_OUT: {2: TileConfig(1, 64, 2), 65: None},
    BIG_DOWN: {2: TileConfig(1, 64, 2), 65: None, 209: TileConfig(2, 256, 4), 241: None},
    HALF_QKV: {
        2: TileConfig(1, 64, 2),
        65: None,
        177: TileConfig(1, 128),
        193: None,
        241: TileConfig(1, 128),
    },
    HALF_OUT: {2: TileConfig(1, 64), 129: TileConfig(1, 128)},
    HALF_DOWN: {2: TileConfig(1, 64, 2), 65: None},
}
GATES: dict[tuple[int, int], dict[int, TileConfig | None]] = {
    GATE: {
        2: TileConfig(1, 64, gated=True),
        65: TileConfig(1, 128, gated=True),
        129: TileConfig(1, 192, gated=True),
        193: TileConfig(2, 128, gated=True),
    },
    BIG_GATE: {
        2: TileConfig(3, 64, gated=True),
        65: TileConfig(3, 128, gated=True),
        129: TileConfig(3, 192, gated=True),
        193: None,
        209: TileConfig(3, 256, gated=True),
    },
    HALF_GATE: {
        2: TileConfig(2, 64, gated=True),
        65: TileConfig(2, 128, gated=True),
        129: TileConfig(2, 192, gated=True),
        193: None,
        209: TileConfig(3, 128, gated=True),
    },
}
CHOICES = [(choose_tile_config, *item) for item in MEASURED.items()]
CHOICES += [(choose_gated_tile_config, *item) for item in GATES.items()]


CHOSEN = {d for _, _, found in CHOICES for d in found.values() if d is not None}
EVERY = pytest.mark.parametrize("config", sorted(CHOSEN, key=str), ids=str)
# Of every form the tallest tile, which needs most registers.
TALLEST = {
    (c.num_warp_groups, c.num_splits > 1, c.gated): c
    for c in sorted(CHOSEN, key=lambda c: c.block_m)
}
COMPILED = [
    pytest.param(
        config,
        kind,
        marks=() if kind == "bf16" and config in TALLEST.values() else pytest.mark.slow,
    )
    for config in sorted(CHOSEN, key=str)
    for kind in ("bf16", "fp16")
]


@pytest.mark.parametrize(("choice", "shape", "configs"), CHOICES)
def test_the_rule_gives_what_was_measured(
    choice: Callable[..., TileConfig | None],
    shape: tuple[int, int],
    configs: dict[int, TileConfig | None],
) -> None:
    expected = None
    for rows in range(1, 258):
        expected = configs.get(rows, expected) if rows < 257 else None
        assert choice(rows, *shape, 132) == expected, rows


@pytest.mark.parametrize("choice", [choose_tile_config, choose_gated_tile_config])
def test_programs_run_all_at_once(choice: Callable[..., TileConfig | None]) -> None:
    """Of other models' shapes, on other devices; and steps are at least as many as who shares them."""
    for processors in (20, 78, 132, 200):
        for features in range(512, 40000, 416):
            for depth in (512, 1024, 2048, 5120, 14336):
                for rows in (2, 63, 65, 128, 129, 193, 256):
                    tile_config = choice(rows, features, depth, processors)
                    if tile_config is not None:
                        assert tile_config.num_programs(rows, features) <= processors
                        assert tile_config.num_splits * 64 <= depth
                        assert (
                            tile_config.num_warp_groups * 64 * tile_config.num_stages * 128
                            <= 227 << 10
                        )
    assert choose_tile_config(8, 151936, 1024, 132) is None, "an output head"
    assert (
        choose_tile_config(8, 4100, 1024, 132) is None
        and choose_gated_tile_config(8, 6152, 1024, 132) is None
    )


def test_where_it_does_not_work_torch_serves(
    fails: Callable[..., bool],
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_self_check", fails)
    request.addfinalizer(module._kernel_works.cache_clear)

    def loaded(op: str, capability: tuple[int, int], dtype: str = "bfloat16") -> Any:
        shape = {"in_features": 2048, "out_features": 1024}
        request = KernelRequest(DeviceInfo("cuda", capability), dtype, shape)
        offer = treadle_kernels_triton.treadle_kernel_op(op, request)
        assert isinstance(offer, KernelOffer)
        return offer.load().keywords["small_batch"]

    module._kernel_works.cache_clear()
    with caplog.at_level(logging.WARNING):
        for capability, dtype in ((8, 0), "bfloat16"), ((10, 0), "bfloat16"), ((9, 0), "float32"):
            assert loaded("linear", capability, dtype) is None
        assert not caplog.records, "nothing was tried"
        for op in ("linear", "linear_split_k", "linear"):
            assert loaded(op, (9, 0)) is None
    messages = [r.getMessage() for r in caplog.records if "torch's linear serves" in r.getMessage()]
    assert len(messages) == 1, "once for a process"


@pytest.mark.parametrize(("config", "kind"), COMPILED, ids=str)
def test_it_compiles_and_no_loop_spills(
    config: TileConfig, kind: str, for_hopper: Callable[..., str]
) -> None:
    from treadle_kernels_triton.hopper.small_batch_kernel import (
        REGISTERS,
        WARPS,
        small_batch_kernel,
    )
    from triton.experimental.gluon import language as gl

    def described(*shape: int) -> str:
        layout = gl.NVMMASharedLayout(2 * shape[-1], 16, len(shape))
        return f"tensordesc<{kind}{list(shape)},{layout!r}>"

    parts, gated = config.num_splits > 1, config.gated
    constants = {
        "NUM_WARP_GROUPS": config.num_warp_groups,
        "BLOCK_M": config.block_m,
        "ACC0_M": config.acc0_m,
    }
    constants |= {"NUM_STAGES": config.num_stages, "GATED": gated, "SPLIT_K": parts}
    types = {"x_desc": described(64, 64), "x_desc_16": described(16, 64), "bias": f"*{kind}"}
    types["w_desc"] = described(4, 2, 8, 64) if gated else described(64, 64)
    result = (16, 64) if parts else (config.store_rows, 32 if gated else 64)
    types |= {"y_desc": described(*result), "out": "*fp32" if parts else f"*{kind}"}
    options = {
        "num_warps": WARPS,
        "maxnreg": REGISTERS[config.num_warp_groups - 1],
        "launch_pdl": True,
    }
    spills = 64 if config.block_m == 256 else 0  # after the last product
    ptx = for_hopper(small_batch_kernel, constants, types, ("bias", "out"), spills, **options)
    assert ptx.count("wgmma.mma_async") >= 8 * config.num_warp_groups
    assert ("stmatrix" in ptx) != parts, "results are turned around on their way"
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")


@EVERY
def test_what_is_launched(config: TileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as there are tiles and shares, boxes that fit together, room for the results."""
    from treadle_kernels_triton.hopper import small_batch_kernel as kernel

    launches: list[tuple[Any, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *given, **constants: launches.append((grid, given, constants))

    monkeypatch.setattr(kernel, "small_batch_kernel", Launched())
    plain = config.num_splits == 1 and not config.gated
    rows, features, depth = 130, 784, 520
    x, weight = torch.randn(rows, depth).bfloat16(), torch.randn(features, depth).bfloat16()
    bias = torch.randn(features).bfloat16() if plain else None
    out = SmallBatchLinear(x.dtype, 132, choose_tile_config, ()).multiply(x, weight, bias, config)
    [((programs,), arguments, constants)] = launches
    tiles = -(-features // (64 * config.num_warp_groups)) * -(-rows // config.block_m)
    assert programs == tiles * config.num_splits == config.num_programs(rows, features)
    x_desc, rest_desc, weights, results, added, written, *numbers = arguments
    assert x_desc.base is x and x_desc.block_shape == [64, 64] and rest_desc.block_shape == [16, 64]
    assert numbers == [rows, features, -(-rows // config.block_m), 9, config.num_splits, plain]
    assert added is (bias if plain else x) and written is out
    assert constants["SPLIT_K"] == (config.num_splits > 1) and constants["GATED"] == config.gated
    if config.gated:
        halves = weight.view(2, features // 16, 8, depth).transpose(0, 1)
        assert torch.equal(weights.base, halves) and weights.block_shape == [4, 2, 8, 64]
        assert out.shape == (rows, features // 2) and results.block_shape[1] == 32
    elif plain:
        assert weights.base is weight and out.shape == (rows, features)
    else:
        assert out.shape == (config.num_splits, rows, features) and out.dtype == torch.float32
    if config.num_splits == 1:
        assert results.base is out and config.acc0_m % results.block_shape[0] == 0


def test_integers_do_not_make_other_kernels() -> None:
    from treadle_kernels_triton.hopper.small_batch_kernel import small_batch_kernel

    pointers = ("x_desc", "x_desc_16", "w_desc", "y_desc", "bias", "out")
    plain = [p for p in small_batch_kernel.params if not p.is_constexpr and p.name not in pointers]
    assert len(plain) == 6 and all(p.do_not_specialize for p in plain)


Off = Callable[[torch.Tensor, torch.Tensor], float]
CLOSE = 5e-3  # sums in another order are rounded to a neighbour now and then


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @EVERY
    def test_results(self, config: TileConfig, dtype: torch.dtype, off: Off) -> None:
        torch.manual_seed(0)
        batches = SmallBatchLinear(dtype, 132, choose_tile_config, ())
        plain = config.num_splits == 1 and not config.gated
        for features, depth in ((1024, 2048), (528, 328), (4096, 1024)):
            weight = (torch.randn(features, depth, device="cuda") * depth**-0.5).to(dtype)
            bias = torch.randn(features, device="cuda").to(dtype)
            for rows in (1, 15, 16, 17, 64, 65, 127, 129, 200, 256, 300):
                wide = torch.randn(rows, depth + 8, device="cuda").to(dtype)
                wide[:, depth:] = torch.nan  # between the rows
                x = wide[:, :depth]
                for kernel_bias in (None, bias) if plain else (None,):
                    expected = F.linear(x, weight, kernel_bias)
                    if config.gated:
                        expected = silu_and_mul(expected)
                    actual = batches.multiply(x, weight, kernel_bias, config)
                    assert torch.equal(actual, batches.multiply(x, weight, kernel_bias, config))
                    total = actual.sum(0) if config.num_splits > 1 else actual
                    assert off(total, expected) < CLOSE, (rows, features)

    @EVERY
    def test_nothing_is_written_past_the_end(
        self, config: TileConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batches = SmallBatchLinear(torch.bfloat16, 132, choose_tile_config, ())
        rows, features = 2 * config.block_m + 5, 528
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        weight = torch.randn(features, 1024, device="cuda").bfloat16() * 0.03
        room = torch.full((1 << 22,), 7.0, device="cuda")

        def empty(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
            return room.view(dtype)[: torch.Size(shape).numel()].view(shape)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            out = batches.multiply(x, weight, None, config)
        size = out.numel() * out.element_size() // 4
        assert bool((room[size:] == 7.0).all()) and bool(out.isfinite().all())
        assert not bool((out == 7.0).all())

    @pytest.mark.parametrize("op", ["linear", "linear_split_k", "linear_silu_and_mul"])
    @pytest.mark.parametrize("shape", [QKV, OUT, GATE, BIG_DOWN])
    def test_it_is_captured(self, op: str, shape: tuple[int, int], off: Off) -> None:
        """The first calls of all: in the graph. Outside of one torch multiplies."""
        features, depth = shape
        request = KernelRequest(
            DeviceInfo("cuda", torch.cuda.get_device_capability()),
            "bfloat16",
            {"in_features": depth, "out_features": features},
        )
        offer = treadle_kernels_triton.treadle_kernel_op(op, request)
        assert isinstance(offer, KernelOffer)
        kernel = offer.load()
        weight = (torch.randn(features, depth, device="cuda") * depth**-0.5).bfloat16()
        for rows in (8, 96, 192, 256):
            x = torch.randn(rows, depth, device="cuda").bfloat16()

            def reference(x: torch.Tensor = x) -> torch.Tensor:
                y = F.linear(x, weight)
                return silu_and_mul(y) if op == "linear_silu_and_mul" else y

            assert off(kernel(x, weight, None), reference()) < CLOSE
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                actual = kernel(x, weight, None)
            for _ in range(3):
                x.normal_()
                actual.fill_(torch.nan)
                graph.replay()
                assert off(actual.sum(0) if actual.dim() == 3 else actual, reference()) < CLOSE, (
                    rows
                )

    def test_shapes_of_models_get_all_that_was_chosen(self) -> None:
        for choice, shape, configs in CHOICES:
            batches = create_small_batch_linear("bfloat16", *shape, choice)
            assert batches is not None and batches._configs == set(configs.values()) - {None}
