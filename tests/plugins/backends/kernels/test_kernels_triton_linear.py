"""Linear layers whose depth is shared: what adds the parts, and when which kernel multiplies.

Through Triton's interpreter, where kernels in Gluon cannot run: torch multiplies in their place.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

PROLOGUE = """
    import torch
    from treadle_layers_kit import ops
    torch.manual_seed(0)
    def near(found, want, limit=1e-5):
        assert found.shape == want.shape and found.dtype == want.dtype
        assert (found.float() - want.float()).norm() < limit * want.float().norm()
"""
PARTS = """
    from treadle_kernels_triton.split_k_reduce import reduce_split_k
    from treadle_kernels_triton.norm import fused_add_partials_rms_norm
    for count, rows, size in (1, 5, 96), (2, 1, 64), (4, 40, 72):
        parts, bias = torch.randn(count, rows, size), torch.randn(size)
        near(reduce_split_k(parts, None, torch.float32), parts.sum(0))
        near(reduce_split_k(parts, bias, torch.float32), parts.sum(0) + bias)
        residual, weight = torch.randn(rows, size), torch.randn(size)
        want = ops.fused_add_rms_norm(parts.sum(0), residual, weight, 1e-5, 1.0)
        y, after = fused_add_partials_rms_norm(parts, residual, weight, 1e-5, 1.0)
        near(y, want[0])
        near(after, want[1])
        assert after is residual
    # Of numbers whose sums are exact: rounded to the dtype before the residual is added.
    parts = torch.randint(-99, 99, (3, 4, 64)) / 64 + 256.0
    residual = torch.randint(-99, 99, (4, 64)).half()
    assert torch.equal(reduce_split_k(parts, None, torch.float16), parts.sum(0).half())
    whole = ops.fused_add_rms_norm(parts.sum(0).half(), residual, torch.ones(64).half(), 1e-5)
    found = fused_add_partials_rms_norm(parts, residual, torch.ones(64).half(), 1e-5)
    assert torch.equal(found[1], whole[1])
"""
BATCHES = """
    from torch.nn.functional import linear as product
    from treadle_kernels_triton.hopper.small_batch import SmallBatchLinear, choose_tile_config, choose_gated_tile_config
    from treadle_kernels_triton import linear as module
    from treadle_kernels_triton.linear import linear, linear_split_k, linear_silu_and_mul
    module.silu_and_mul = lambda y, use_pdl: ops.silu_and_mul(y)  # the interpreter cuts bfloat16 off
    captures = [True]
    torch.cuda.is_current_stream_capturing = lambda: captures[0]
    class Multiplied(SmallBatchLinear):
        def __init__(self, choice):
            found = {choice(rows, *shape, 132) for rows in range(257) for shape in SHAPES}
            super().__init__(torch.bfloat16, 132, choice, found - {None})
            self.calls = []
        def multiply(self, x, weight, bias, config):
            self.calls.append(config)
            if config.gated:
                return ops.silu_and_mul(product(x, weight))
            if config.num_splits == 1:
                return product(x, weight, bias)
            pieces = zip(*(t.float().tensor_split(config.num_splits, 1) for t in (x, weight)))
            return torch.stack([product(*piece) for piece in pieces])
    SHAPES = (4096, 1024), (1024, 2048)
    plain, gates = Multiplied(choose_tile_config), Multiplied(choose_gated_tile_config)
    for features, depth in SHAPES:
        weight, bias = torch.randn(features, depth).bfloat16() / 32, torch.randn(features).bfloat16()
        for shape in (5, depth), (2, 40, depth), (250, depth):
            x = torch.randn(shape).bfloat16()
            for given in None, bias:
                near(linear(x, weight, given, small_batch=plain), product(x, weight, given), 2e-2)
                splits = [config.num_splits for config in plain.calls]
                assert splits == ([1] if depth == 1024 else [] if len(x) == 250 else [4])
                plain.calls.clear()
                found = linear_split_k(x, weight, given, small_batch=plain)
                whole = found.dim() == len(shape)
                assert whole == (depth == 1024 or given is not None or len(shape) == 3)
                near(found if whole else found.sum(0).bfloat16(), product(x, weight, given), 2e-2)
                assert len(plain.calls) == (not whole or depth == 1024 or len(x) < 250)
                plain.calls.clear()
            want = ops.silu_and_mul(product(x, weight))
            near(linear_silu_and_mul(x, weight, None, small_batch=gates), want, 2e-2)
            assert len(gates.calls) == (features == 4096), "or most multiprocessors had nothing to do"
            gates.calls.clear()
    x, weight = torch.randn(8, 1024).bfloat16(), torch.randn(4096, 1024).bfloat16()
    wide = torch.randn(300, 1024).bfloat16()
    for given in (
        (x.float(), weight.float(), None), (wide, weight, None), (x[:1], weight, None),
        (x[:, :-8], weight[:, :-8], None), (torch.randn(8, 1028).bfloat16()[:, :-4], weight, None),
    ):
        near(linear(*given, small_batch=plain), product(*given), 2e-2)
        near(linear_split_k(*given, small_batch=plain), product(*given), 2e-2)
    near(linear_silu_and_mul(x, weight, bias[:1].expand(4096), small_batch=gates), ops.silu_and_mul(product(x, weight, bias[:1].expand(4096))), 2e-2)
    captures[0] = False
    near(linear(x, weight, None, small_batch=plain), product(x, weight), 2e-2)
    near(linear_silu_and_mul(x, weight, None, small_batch=gates), ops.silu_and_mul(product(x, weight)), 2e-2)
    assert not plain.calls and not gates.calls
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(PARTS, id="parts"),
        pytest.param(BATCHES, id="batches", marks=pytest.mark.slow),
    ],
)
def test_it_equals_the_layers_own(code: str, in_process: Callable[..., None]) -> None:
    in_process(PROLOGUE, code, interpret=True)
