"""The fused kernels against the layers' own operations, through Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so everything runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from treadle.api.cache import DeviceInfo
from treadle.api.kinds import KERNEL_OPS
from treadle.api.types import KernelOffer, KernelRequest, Refusal
from treadle.plugins import PluginManager

CUDA = DeviceInfo("cuda", (9, 0))

CHECKS = {
    "norms": """
        from treadle_kernels_triton.norm import fused_add_rms_norm, rms_norm
        for shape in ((5, 96), (3, 2, 64), (1, 1000)):
            x, weight = torch.randn(shape), torch.randn(shape[-1])
            close(rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
            close(rms_norm(x[:, ..., :], weight, 1e-5, 1.0), ops.rms_norm(x, weight, 1e-5, 1.0))
        x, residual, weight = torch.randn(4, 80)[:, :72], torch.randn(4, 72), torch.randn(72)
        want = ops.fused_add_rms_norm(x, residual, weight, 1e-5)
        close(fused_add_rms_norm(x, residual, weight, 1e-5)[0], want[0])
        close(residual, want[1])
    """,
    "silu_and_mul": """
        from treadle_kernels_triton.activation import silu_and_mul
        for shape in ((3, 200), (1, 8192), (2, 2, 12)):
            x = torch.randn(shape) * 5
            close(silu_and_mul(x), ops.silu_and_mul(x))
    """,
    "clamped_swiglu": """
        from treadle_kernels_triton.activation import clamped_swiglu
        for shape in ((3, 200), (1, 4400), (2, 2, 12)):
            x = torch.randn(shape) * 5
            for alpha, limit in (1.702, 7.0), (1.0, 0.5):
                close(clamped_swiglu(x, alpha, limit), ops.clamped_swiglu(x, alpha, limit))
        x[0, 0, 0], x[1, 0, 1] = float("nan"), float("nan")
        assert clamped_swiglu(x, 1.702, 7.0).isnan().sum() == 2, "a fault stays one"
    """,
    "experts": """
        from treadle_kernels_triton.routing import combine_experts, topk_softmax
        for rows, experts, k in (1, 4, 4), (7, 12, 3), (5, 128, 8), (3, 40, 1), (0, 8, 2):
            logits = torch.randn(rows, experts + 3)[:, :experts] * 4
            for normalize in True, False:
                (weights, ids), want = topk_softmax(logits, k, normalize), ops.topk_softmax(logits, k, normalize)
                assert ids.dtype == torch.int64 and torch.equal(ids, want[1])
                close(weights, want[0])
            y = torch.randn(rows, k, 1100 + k)
            close(combine_experts(y, weights), ops.combine_experts(y, weights))
        assert topk_softmax(torch.zeros(1, 6), 3, True)[1].unique().numel() == 3, "equal ones differ"
        bad = topk_softmax(torch.full((2, 6), float("nan")), 3, True)[1]
        assert ((bad >= 0) & (bad < 6)).all(), "ids are read as places of experts"
    """,
    "fused_experts": """
        from treadle_kernels_triton import experts as kernels
        from treadle_layers_kit.plain_experts import fused_experts
        names = "FEW_CHOICES", "TILES", "MANY_ROWS"
        chosen = [tuple(getattr(kernels, name) for name in names)]
        chosen += [(0, (), kernels.Tile(32, rows, 32, 4, 2, group_m=rows % 7)) for rows in (16, 128)]
        for rows, experts, k, hidden, inner in (
            (1, 4, 4, 72, 40), (7, 12, 3, 96, 40), (50, 3, 2, 40, 64), (90, 6, 1, 40, 64), (170, 6, 1, 40, 64),
            (3, 40, 1, 64, 32), (0, 8, 2, 64, 32),
        ):
            for values in chosen:
                for name, value in zip(names, values):
                    setattr(kernels, name, value)
                x, ids = torch.randn(rows, hidden), torch.rand(rows, experts).topk(k).indices
                gate_up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
                for biases in (None, None), (torch.randn(experts, 2 * inner), torch.randn(experts, hidden)):
                    given = x, ids, gate_up, down, *biases, ops.silu_and_mul
                    close(kernels.fused_experts(*given), fused_experts(*given))
    """,
    "rope_and_cache": """
        from treadle_kernels_triton.rotary import rope_and_cache
        for tokens, heads, kv_heads, size, normed in (
            (3, 4, 2, 32, True), (5, 3, 3, 64, False), (7, 16, 8, 32, True),
        ):
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size)
            angle = torch.randn(tokens, 1, size // 2)
            cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
            weights = torch.randn(size), torch.randn(size)
            cache = torch.full((2, 90, kv_heads, size), 7.0)
            slots = torch.randperm(90)[:tokens]
            slots[1] = -1
            norms = (*weights, 1e-6, 0.0) if normed else None
            q = rope_and_cache(qkv, cos, sin, norms, cache, slots)
            a, b, c = qkv.view(tokens, -1, size).split((heads, kv_heads, kv_heads), 1)
            if normed:
                a, b = ops.rms_norm(a, weights[0], 1e-6), ops.rms_norm(b, weights[1], 1e-6)
            a, b = ops.rotary(a, b, cos, sin)
            close(q, a)
            kept = slots >= 0
            close(cache[0, slots[kept]], b[kept])
            close(cache[1, slots[kept]], c[kept])
            rest = torch.ones(90, dtype=torch.bool).index_fill(0, slots[kept], False)
            assert (cache[:, rest] == 7.0).all(), "a foreign slot was written"
    """,
    "rope_and_cache_fp8": """
        from treadle_kernels_triton.rotary import rope_and_cache, rope_and_cache_fp8
        # Into a wider type, because the interpreter rounds to fp8 wrongly: what is stored, unrounded.
        tokens, heads, kv_heads, size, limit = 5, 4, 2, 32, 2.0
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size)
        angle = torch.randn(tokens, 1, size // 2)
        cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
        slots = torch.randperm(20)[:tokens]
        slots[1] = -1
        for norms in None, (torch.randn(size), torch.randn(size), 1e-6, 0.0):
            plain, scaled = (torch.full((2, 20, kv_heads, size), 7.0) for _ in range(2))
            q = rope_and_cache(qkv, cos, sin, norms, plain, slots)
            more = dict(scales=(0.5, 0.25), limit=limit)
            close(rope_and_cache(qkv, cos, sin, norms, scaled, slots, **more), q)
            kept = slots[slots >= 0]
            want = (plain[:, kept] / torch.tensor([0.5, 0.25]).view(2, 1, 1, 1)).clamp(-limit, limit)
            close(scaled[:, kept], want)
            assert (scaled == 7.0).sum() == 2 * 16 * kv_heads * size, "a foreign slot was written"
        for dtype, limit in (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0):
            cache = torch.zeros(2, 20, kv_heads, size).to(dtype)
            rope_and_cache_fp8(qkv * 1e6, cos, sin, None, cache, slots, (1.0, 1.0))
            assert cache.float().isfinite().all() and cache.float().max() == limit
    """,
    "linear": """
        from torch.nn.functional import linear as product
        from treadle_kernels_triton.linear import linear, linear_silu_and_mul, small_linear
        from treadle_kernels_triton.tiles import Tile
        for tile in Tile(4, 32, 1), Tile(8, 256, 1):
            for rows, (width, depth) in (
                (1, (24, 96)), (2, (32, 64)), (3, (10, 80)), (4, (10, 80)), (1, (10, 80)),
            ):
                for bias in None, torch.randn(width):
                    x, weight = torch.randn(rows, depth + 16)[:, :depth], torch.randn(width, depth)
                    want = product(x, weight, bias)
                    close(small_linear(x, weight, bias, False, tile, False), want)
                    if rows == 1:
                        close(small_linear(x, weight, bias, True, tile, False), ops.silu_and_mul(want))
        weight, bias = torch.randn(48, 32), torch.randn(48)
        for shape in ((32,), (1, 32), (2, 2, 32), (5, 32), (0, 32)):
            x = torch.randn(shape)
            want = product(x, weight, bias)
            close(linear(x, weight, bias), want)
            close(linear_silu_and_mul(x, weight, bias), ops.silu_and_mul(want))
        from treadle_kernels_triton.linear import ZeroBiases
        from treadle_kernels_triton.tiles import is_bias_faster
        zeros, x, weight = ZeroBiases(), torch.randn(17, 4096), torch.randn(2048, 4096)
        assert is_bias_faster(17, 2048, 4096) and not is_bias_faster(128, 2048, 4096)
        assert not is_bias_faster(17, 24576, 4096) and not is_bias_faster(8192, 4096, 12288)
        close(linear(x, weight, None, zero_biases=zeros), product(x, weight))
        assert zeros.bias(weight) is zeros.bias(weight[:, :8]) and not zeros.bias(weight).any()
        bias = torch.randn(2048)
        close(linear(x, weight, bias, zero_biases=zeros), product(x, weight, bias))
        weight, bias = torch.randn(48, 32), torch.randn(48)
        x = torch.randn(32, 3).t()  # not contiguous in its last dimension
        close(linear(x, weight, None), product(x, weight))
        close(linear(x, weight[::2], None), product(x, weight[::2]))
    """,
    "sample": """
        from treadle_kernels_triton.sample import argmax, sample
        from treadle.api.step_types import NewSequenceData
        from treadle.api.sampling_params import SamplingParams
        from treadle.sampling.sampler import Sampler
        inf, nan = float("inf"), float("nan")
        for vocab in 300, 320, 1000:
            kinds = [{"temperature": 0.0 if i % 4 == 0 else 0.3 + i / 20} for i in range(40)]
            sampler = Sampler(40, vocab)
            sampler.add_sequences([
                NewSequenceData(i, SamplingParams(**kind), 2, [1, 2], 7919 * i, [0], [])
                for i, kind in enumerate(kinds)
            ])
            logits = torch.randn(40, vocab + 8)[:, :vocab] * 3
            for row in 3, 4:  # a row that samples, a row that does not
                logits[row, 5], logits[row + 4, 7], logits[row + 8, :] = nan, inf, -inf
                logits[row + 12, 10:200] = -inf
                logits[row + 16, :] = -inf
                logits[row + 16, 40] = 1.0
                logits[row + 20, :] = 2.0
            positions = torch.arange(40) + 5
            for rows in range(40), range(0, 40, 4), [i for i in range(40) if i % 4]:
                slots = torch.tensor(list(rows))
                features = sampler.features(list(rows))
                given = logits[slots], slots, positions[slots], features
                sampler.sample_op = sampler.argmax_op = None
                want, want_bad = sampler.sample_graphable(*given)
                sampler.sample_op, sampler.argmax_op = sample, argmax
                found, bad = sampler.sample_graphable(*given)
                assert bad.dtype == torch.bool and torch.equal(bad, want_bad) and bad.any()
                assert found.dtype == torch.int64
                assert ((found >= 0) & (found < vocab)).all(), "a bad row's id must be usable too"
                assert torch.equal(found[~bad], want[~bad])
    """,
}
BUILDS = """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from treadle_kernels_triton import activation, experts, linear, norm, rotary, sample, split_k_reduce
    from treadle_kernels_triton.packed import reorder

    def build(kernel, warps, constants, **types):
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        options = {"num_warps": warps, "launch_pdl": True}
        aligned = [n for n in names if signature[n][0] == "*" or n == "x_stride"]
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants}
        source = ASTSource(kernel, signature, values, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 227 << 10
        code = made.asm["ptx"]
        wait = code.index("griddepcontrol.wait")
        assert code.index("griddepcontrol.launch_dependents") < wait
        assert "st.global" not in code[:wait], "something is written before the results are awaited"
        return code[:wait].count("ld.global")

    numbers = dict.fromkeys(("N", "K", "x_stride", "stride", "t_stride"), "i32")
    for rows, gated in (1, False), (1, True), (4, False):
        chosen = dict(NUM_ROWS=rows, BLOCK_N=4, BLOCK_K=1024, SINGLE_K_BLOCK=False, HAS_BIAS=True, GATED=gated)
        assert build(linear.small_linear_kernel, 4, {**chosen, "USE_PDL": True}, **numbers) > 0
    tables = dict(temperature="*fp32", tile_max="*fp32", tile_argmax="*i32", block_sum="*fp32", greedy="*i32")
    tables |= dict(offsets="*i64", strides="*i64", positions="*i64", tokens="*i64", invalid="*u8")
    tables |= dict(g_stride="i32", o_stride="i32", num_tiles="i32")
    for random, greedy in (True, False), (True, True), (False, True):
        chosen = dict(VOCAB_SIZE=151936, NUM_BLOCKS=1187, BLOCK_SIZE=128, BLOCK_SIZE_PADDED=128, BLOCKS_PER_TILE=32, USE_PDL=True)
        chosen |= dict(RANDOM=random, GREEDY=greedy)
        assert build(sample.block_stats_kernel, 4, chosen, **numbers, **tables) == 0
        assert build(sample.sample_kernel, 8, {**chosen, "NUM_BLOCKS_PADDED": 2048}, **numbers, **tables) == 0
    scales = dict(eps="fp32", offset="fp32", v_offset="i64", slot_mapping="*i64")
    scales |= dict(k_scale="fp32", v_scale="fp32")
    chosen = dict(NUM_HEADS=16, NUM_KV_HEADS=8, HEAD_DIM=128, BLOCK_H=8, USE_PDL=True)
    for normed in True, False:
        for limit, cache in (0.0, "*bf16"), (448.0, "*fp8e4nv"), (57344.0, "*fp8e5"):
            more = {"HAS_NORM": normed, "FP8_MAX": limit}
            before = build(rotary.rope_and_cache_kernel, 4, {**chosen, **more}, **scales, cache=cache)
            assert bool(before) == normed, "only the norms' weights are read early"
    for parts, x in (0, "*bf16"), (4, "*fp32"):
        chosen = dict(HIDDEN_SIZE=1024, BLOCK_SIZE=1024, HAS_RESIDUAL=True, NUM_SPLITS=parts, USE_PDL=True)
        assert build(norm.norm_kernel, 2, chosen, **{**numbers, **scales, "x": x})
    sizes = dict.fromkeys(("size", "features", "has_bias"), "i32")
    chosen = dict(NUM_SPLITS=4, BLOCK_SIZE=1024, USE_PDL=True)
    assert build(split_k_reduce.reduce_split_k_kernel, 4, chosen, partials="*fp32", **sizes) > 0
    assert build(activation.silu_and_mul_kernel, 4, dict(INTERMEDIATE_SIZE=3072, BLOCK_SIZE=2048, USE_PDL=True)) == 0
    sizes = dict.fromkeys(("K", "P", "stride", "shared", "num_experts"), "i32") | dict(topk_ids="*i64", order="*i32")
    assert build(reorder.reorder_experts_kernel, 4, dict(BLOCK=1024, USE_PDL=True), **sizes) == 0
    for tile in *experts.TILES, experts.MANY_ROWS:
        for direct in {False, tile is experts.TILES[0]}:
            chosen = dict(BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, GROUP_M=tile.group_m)
            chosen |= dict(DIRECT=direct, HAS_BIAS=True, USE_PDL=True)
            given = {**numbers, **sizes, "tiles": "*i32", "order": "*i64" if direct else "*i32"}
            assert build(experts.grouped_linear_kernel, tile.num_warps, chosen, **given) == 0
"""
PROLOGUE = """
    import torch
    from treadle_layers_kit import ops
    torch.manual_seed(0)
    def close(found, want):
        assert found.shape == want.shape
        off = (found - want).norm() / want.norm() if want.numel() else 0.0
        assert off < 1e-5, (found - want).abs().max()
"""


@pytest.mark.parametrize("name", CHECKS)
def test_kernels_equal_the_layers_own(name: str, in_process: Callable[..., None]) -> None:
    pytest.importorskip("triton")
    in_process(PROLOGUE, CHECKS[name], interpret=True)


def test_kernels_compile_for_hopper_and_wait_before_they_write(
    in_process: Callable[..., None],
) -> None:
    """What starts early may read weights, and nothing else, until the kernel before has finished."""
    pytest.importorskip("triton")
    in_process(BUILDS, interpret=False)


@pytest.mark.parametrize(
    "op",
    [
        "rms_norm",
        "fused_add_rms_norm",
        "fused_add_partials_rms_norm",
        "silu_and_mul",
        "rope_and_cache",
        "rope_and_cache_fp8",
        "linear",
        "linear_split_k",
        "linear_silu_and_mul",
        "sample",
        "argmax",
        "apply_bitmask",
    ],
)
def test_offers_on_cuda_and_refuses_elsewhere(op: str) -> None:
    import treadle_kernels_triton

    shape = {"size": 1024, "head_size": 128, "heads": 16, "kv_heads": 8, "vocab_size": 320}
    shape |= {"in_features": 1024, "out_features": 4096}
    offer = treadle_kernels_triton.treadle_kernel_op(op, KernelRequest(CUDA, "bfloat16", shape))
    pytest.importorskip("triton")
    assert isinstance(offer, KernelOffer)
    for device, dtype, reason in (
        (DeviceInfo("cpu"), "bfloat16", "device 'cpu' is not CUDA"),
        (DeviceInfo("cuda", (7, 5)), "bfloat16", "capability 7.5 is below 8.0"),
        (CUDA, "int8", "dtype int8"),
    ):
        refusal = treadle_kernels_triton.treadle_kernel_op(op, KernelRequest(device, dtype, shape))
        assert isinstance(refusal, Refusal) and reason in refusal.reasons[0]


def test_an_unknown_operation_is_not_answered() -> None:
    request = KernelRequest(CUDA, "bfloat16", {"size": 64})
    assert PluginManager().best_offer(KERNEL_OPS, op="no_such_op", request=request) is None


def test_odd_shapes_are_refused() -> None:
    import treadle_kernels_triton

    request = KernelRequest(CUDA, "bfloat16", {"head_size": 80, "heads": 2, "kv_heads": 2})
    refusal = treadle_kernels_triton.treadle_kernel_op("rope_and_cache", request)
    assert isinstance(refusal, Refusal) and "head size 80" in refusal.reasons[0]
    older = KernelRequest(DeviceInfo("cuda", (8, 6)), "bfloat16", {"head_size": 64})
    refusal = treadle_kernels_triton.treadle_kernel_op("rope_and_cache_fp8", older)
    assert isinstance(refusal, Refusal) and "8.9" in refusal.reasons[0]
    request = KernelRequest(CUDA, "bfloat16", {"size": 65536})
    refusal = treadle_kernels_triton.treadle_kernel_op("rms_norm", request)
    assert isinstance(refusal, Refusal) and "65536" in refusal.reasons[0]
    request = KernelRequest(CUDA, "bfloat16", {"in_features": 100, "out_features": 4096})
    refusal = treadle_kernels_triton.treadle_kernel_op("linear", request)
    assert isinstance(refusal, Refusal) and "in_features 100" in refusal.reasons[0]


def test_only_shapes_that_gain_leave_torch() -> None:
    from treadle_kernels_triton.tiles import choose_tile

    assert choose_tile(1, 4096, 1024, False) and choose_tile(1, 6144, 1024, True)
    assert choose_tile(4, 1024, 3072, False) and not choose_tile(4, 4096, 4096, False)
    assert not choose_tile(5, 1024, 3072, False) and not choose_tile(2, 6144, 1024, True)
    assert choose_tile(2, 4096, 4096, False) and not choose_tile(2, 24576, 4096, False)
    assert not choose_tile(0, 1024, 1024, False)
    assert not choose_tile(1, 151936, 1024, False), (
        "an output head is at the card's bandwidth already"
    )


def test_the_gated_layer_and_the_sampler_take_what_is_offered() -> None:
    """Through the hook of the layers: which kernel is called, and with what."""
    import torch

    from treadle.api.models import ModelContext
    from treadle.sampling.sampler import Sampler
    from treadle_layers_kit import SingleRankCommunicator, ops
    from treadle_layers_kit.mlp import GatedMLP
    from treadle_worker_kit.fusion import apply_fusions
    from treadle_worker_kit.sampler_kernels import install_sampler_kernels

    requests: list[tuple[str, dict[str, int]]] = []

    class Offers:
        def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
            requests.append((op, dict(request.shape)))
            if op == "linear_silu_and_mul":
                return KernelOffer("mine", 1, lambda: fused)
            return KernelOffer("mine", 1, lambda: op) if op == "sample" else None

        def best_offer(self, kind: object, op: str, request: KernelRequest) -> KernelOffer | None:
            return self.kernel(op, request)

    def fused(x: torch.Tensor, weight: torch.Tensor, bias: object) -> torch.Tensor:
        return ops.silu_and_mul(torch.nn.functional.linear(x, weight)) * 2

    context = ModelContext(
        hf_config=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        tp_group=SingleRankCommunicator(),
        quantization=None,
        register_attention=lambda request, spec: pytest.fail("there is no attention here"),
    )
    mlp = GatedMLP(context, "mlp", 8, 12)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 8)
    expected = mlp(x) * 2
    served = apply_fusions(mlp, Offers().kernel, CUDA, "float32").backends
    assert served == {"linear_silu_and_mul": "mine"}
    assert torch.allclose(mlp(x), expected)
    assert ("linear_silu_and_mul", {"in_features": 8, "out_features": 24}) in requests
    sampler = Sampler(2, 320)
    assert install_sampler_kernels(sampler, Offers(), CUDA, "float32") == {"sample": "mine"}
    assert sampler.sample_op == "sample" and sampler.argmax_op is None
