"""The conformance suite of kernels: what is offered computes what the layers' own operation does.

::

    class TestMine(PluginSuite, KernelSuite):
        plugin = "kernels:mine"
        device = DeviceInfo("cuda", (9, 0))     # what to bid for and to run on
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.attention import KernelOffer, KernelRequest, Refusal
from treadle.api.cache import DeviceInfo
from treadle.testing.plugin import FOREIGN, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.plugins import PluginManager

__all__ = ("KernelSuite",)

SHAPES: dict[str, dict[str, int]] = {
    "rms_norm": {"size": 128},
    "fused_add_rms_norm": {"size": 128},
    "silu_and_mul": {"size": 96},
    "linear": {"in_features": 64, "out_features": 48},
    "linear_silu_and_mul": {"in_features": 64, "out_features": 64},
    "argmax": {"vocab_size": 199},
    "int4_linear": {"in_features": 256, "out_features": 64, "group": 128},
}
OTHERS: dict[str, dict[str, int]] = {
    "rope_and_cache": {"heads": 4, "kv_heads": 2, "head_size": 64},
    "rope_and_cache_fp8": {"heads": 4, "kv_heads": 2, "head_size": 64},
    "sample": {"vocab_size": 199},
    "linear_split_k": {"in_features": 2048, "out_features": 64},
    "fused_add_partials_rms_norm": {"size": 128},
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3}


class KernelSuite(Subject):
    """Every operation is put to the backend; what it offers for is run with several row counts."""

    device: ClassVar[DeviceInfo] = DeviceInfo("cpu")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    def bid(self, op: str, request: KernelRequest) -> KernelOffer | Refusal | None:
        """Its answer, or what it raised: for an engine that would be a refusal."""
        host = self._bidding
        asked: Any = host.hooks_for(self.kind, self.key)
        options = host.options(self.kind, self.key)
        bids: list[KernelOffer | Refusal] = asked.treadle_kernel(
            op=op, request=request, options=options
        )
        return next((bid for bid in bids if bid.name == self.key), None)

    @cached_property
    def _bidding(self) -> PluginManager:
        return self.host()

    @pytest.mark.parametrize("op", [*SHAPES, *OTHERS])
    @pytest.mark.parametrize("kind", ["cpu", "cuda", "abacus"])
    def test_a_bid_is_an_offer_or_says_why_not(self, op: str, kind: str) -> None:
        device = DeviceInfo(kind, (3, 5) if kind == "cuda" else None)
        for dtype in (*self.dtypes, "int3"):
            bid = self.bid(op, KernelRequest(device, dtype, {**SHAPES, **OTHERS}[op]))
            if isinstance(bid, Refusal):
                assert bid.reasons and all(reason.strip() for reason in bid.reasons)
            elif bid is not None:
                assert 0 <= bid.score <= 100

    def test_an_unknown_operation_is_nobodys(self) -> None:
        assert self.bid(FOREIGN, KernelRequest(self.device, "float32", {})) is None

    @pytest.mark.parametrize("op", list(SHAPES))
    def test_it_computes_what_the_layers_do(self, op: str) -> None:
        for dtype, kernel in self.offered(op):
            for rows in (1, 2, 7, 33):
                arguments = self.arguments(op, rows, dtype)
                want = _reference(op)(*(_copy(a) for a in arguments))
                self.compare(kernel(*arguments), want, dtype)

    @pytest.mark.parametrize("op", list(SHAPES))
    def test_rows_may_lie_apart(self, op: str) -> None:
        """A part of a wider tensor: what several layers compute at once is split."""
        import torch

        for dtype, kernel in self.offered(op):
            for rows in (2, 7):
                first, *others = self.arguments(op, rows, dtype)
                wide = torch.cat((first, first.flip(0)), dim=-1)
                want = kernel(first, *(_copy(a) for a in others))
                self.compare(kernel(wide[:, : first.shape[1]], *others), want, dtype)

    @pytest.mark.parametrize("op", [op for op in SHAPES if op != "fused_add_rms_norm"])
    def test_arguments_are_left_as_they_are(self, op: str) -> None:
        """But for ``fused_add_rms_norm``, which may overwrite them."""
        import torch

        for dtype, kernel in self.offered(op):
            arguments = self.arguments(op, 3, dtype)
            before = [_copy(a) for a in arguments]
            kernel(*arguments)
            for argument, was in zip(arguments, before, strict=True):
                assert torch.equal(argument, was) if hasattr(was, "shape") else argument == was

    @pytest.mark.parametrize("normed", [False, True])
    def test_queries_are_turned_and_keys_and_values_stored(self, normed: bool) -> None:
        """``rope_and_cache``, with a token that is stored nowhere, in a cache of other tokens'."""
        import torch

        from treadle.layers import ops

        op, rows = "rope_and_cache", 5
        heads, kv_heads, size = OTHERS[op].values()
        for dtype, kernel in self.offered(op):
            made = torch.Generator().manual_seed(1)

            def draw(*shape: int, kind: str = dtype, made: torch.Generator = made) -> Tensor:
                drawn = torch.randn(*shape, generator=made)
                return drawn.to(self.device.kind, getattr(torch, kind))

            qkv, angle = draw(rows, (heads + 2 * kv_heads) * size), draw(rows, 1, size // 2)
            cos = torch.cat((angle.cos(), angle.cos()), -1)
            sin = torch.cat((-angle.sin(), angle.sin()), -1)
            weights = (draw(size), draw(size))
            cache = draw(2, 40, kv_heads, size)
            slots = torch.tensor([31, -1, 0, 7, 8], device=self.device.kind)
            want = cache.clone()
            q, k, v = qkv.view(rows, -1, size).split((heads, kv_heads, kv_heads), 1)
            if normed:
                q, k = (ops.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
            q, k = ops.rotary(q, k, cos, sin)
            want[0, slots[slots >= 0]], want[1, slots[slots >= 0]] = k[slots >= 0], v[slots >= 0]
            norms = (*weights, 1e-6, 0.0) if normed else None
            self.compare((kernel(qkv, cos, sin, norms, cache, slots), cache), (q, want), dtype)

    def test_a_linear_layer_in_parts_adds_up(self) -> None:
        """``linear_split_k``, whose result may also be whole; with a bias it must be."""
        import torch.nn.functional as F

        for dtype, kernel in self.offered("linear_split_k"):
            for rows in (1, 2, 7, 33, 100, 200):
                x, weight, bias = self.arguments("linear_split_k", rows, dtype)
                want, got = F.linear(x, weight), kernel(x, weight, None)
                if got.dim() == 3:
                    assert str(got.dtype) == "torch.float32" and got.is_contiguous()
                    got = got.sum(0).to(want.dtype)
                self.compare(got, want, dtype)
                self.compare(kernel(x, weight, bias), F.linear(x, weight, bias), dtype)

    @pytest.mark.parametrize("parts", [1, 2, 5])
    def test_parts_are_added_before_the_norm(self, parts: int) -> None:
        import torch

        from treadle.layers import ops

        for dtype, kernel in self.offered("fused_add_partials_rms_norm"):
            for rows in (1, 7, 33):
                x, *others = self.arguments("fused_add_rms_norm", rows, dtype)
                made = torch.Generator().manual_seed(parts)
                drawn = torch.randn(parts, *x.shape, generator=made).to(x.device)
                whole = drawn.sum(0).to(x.dtype)
                want = ops.fused_add_rms_norm(whole, *(_copy(a) for a in others))
                self.compare(kernel(drawn, *others), want, dtype)

    def offered(self, op: str) -> list[tuple[str, Callable[..., Any]]]:
        """The kernel by dtype. Skips if there is none."""
        shape = {**SHAPES, **OTHERS}[op]
        # Four bits are packed for activations of 16 bits only.
        dtypes = [d for d in self.dtypes if op != "int4_linear" or d != "float32"]
        bids = {d: self.bid(op, KernelRequest(self.device, d, shape)) for d in dtypes}
        found = [(d, bid.load()) for d, bid in bids.items() if isinstance(bid, KernelOffer)]
        if not found:
            pytest.skip(f"does not offer {op} for {self.device.kind}")
        return found

    def arguments(self, op: str, rows: int, dtype: str) -> tuple[Any, ...]:
        import torch

        made = torch.Generator().manual_seed(rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made).to(self.device.kind, getattr(torch, dtype))

        sizes = {**SHAPES, **OTHERS}[op]
        match op:
            case "rms_norm":
                return draw(rows, 128), draw(128), 1e-6, 0.0
            case "fused_add_rms_norm":
                return draw(rows, 128), draw(rows, 128), draw(128), 1e-6, 0.0
            case "silu_and_mul":
                return (draw(rows, 2 * sizes["size"]),)
            case "argmax":
                return (draw(rows, sizes["vocab_size"]),)
            case "int4_linear":
                from treadle.layers.int4 import pack_codes, pack_steps

                inputs, outputs, group = sizes.values()
                codes, zeros = (
                    torch.randint(16, (n, outputs), generator=made)
                    for n in (inputs, inputs // group)
                )
                scales = torch.rand(inputs // group, outputs, generator=made) / 64
                steps = pack_steps(scales, zeros, getattr(torch, dtype))
                packed = (part.to(self.device.kind) for part in (pack_codes(codes), steps))
                return draw(rows, inputs) / 8, *packed, inputs, group
        inputs, outputs = sizes["in_features"], sizes["out_features"]
        return draw(rows, inputs) / 8, draw(outputs, inputs), draw(outputs)

    def compare(self, got: Any, want: Any, dtype: str) -> None:
        import torch

        tolerance = TOLERANCE[dtype]
        results = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for ours, theirs in results:
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            torch.testing.assert_close(
                ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * 4
            )


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


def _reference(op: str) -> Callable[..., Any]:
    import torch.nn.functional as F

    from treadle.layers import ops
    from treadle.layers.int4 import int4_linear

    def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.max(dim=-1)
        return tokens, ~values.isfinite()

    def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.silu_and_mul(F.linear(x, weight, bias))

    known: dict[str, Callable[..., Any]] = {
        "rms_norm": ops.rms_norm,
        "fused_add_rms_norm": ops.fused_add_rms_norm,
        "silu_and_mul": ops.silu_and_mul,
        "linear": F.linear,
        "linear_silu_and_mul": linear_silu_and_mul,
        "argmax": argmax,
        "int4_linear": int4_linear,
    }
    return known[op]
