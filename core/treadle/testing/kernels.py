"""The conformance suite of kernels: what is offered computes the declared operation.

::

    class TestMine(PluginSuite, KernelSuite):
        plugin = "kernel_ops:mine"
        device = DeviceInfo("cuda", (9, 0))     # what to bid for and to run on

Its cases are the operations of ``treadle.testing.kernel_ops.KERNEL_OPS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

from treadle.api.attention import KernelOffer, KernelRequest, Refusal
from treadle.api.cache import DeviceInfo
from treadle.layers.kernel_op import Arg, KernelOp
from treadle.testing.kernel_examples import copied, example_args
from treadle.testing.kernel_ops import KERNEL_OPS, require_layer_ops
from treadle.testing.plugin import FOREIGN, PluginTest

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("KernelSuite",)

require_layer_ops()  # without them most of the cases would silently be missing

PARTIALS = {1: 1, 2: 2, 7: 5, 33: 3, 100: 2}
"""How many partial sums there are, by number of rows."""
FP8_TOLERANCE = 0.13
"""One step of the three bits of a float8_e4m3fn."""


class KernelSuite(PluginTest):
    """Every operation is put to the backend; what it offers for is run with several row counts."""

    device: ClassVar[DeviceInfo] = DeviceInfo("cpu")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    def bid(self, op: str, request: KernelRequest) -> KernelOffer | Refusal | None:
        """Its answer, or what it raised: for an engine that would be a refusal."""
        plugins = self._bidding
        hooks: Any = plugins.hooks_for(self.kind, self.key)
        options = plugins.options(self.kind, self.key)
        bids: list[KernelOffer | Refusal] = hooks.treadle_kernel_op(
            op=op, request=request, options=options
        )
        return next((bid for bid in bids if bid.name == self.key), None)

    @cached_property
    def _bidding(self) -> PluginManager:
        return self.host()

    @pytest.mark.parametrize("op", list(KERNEL_OPS))
    @pytest.mark.parametrize("kind", ["cpu", "cuda", "abacus"])
    def test_a_bid_is_an_offer_or_says_why_not(self, op: str, kind: str) -> None:
        device = DeviceInfo(kind, (3, 5) if kind == "cuda" else None)
        for dtype in (*self.dtypes, "int3"):
            bid = self.bid(op, KernelRequest(device, dtype, KERNEL_OPS[op].small_sizes))
            if isinstance(bid, Refusal):
                assert bid.reasons and all(reason.strip() for reason in bid.reasons)
            elif bid is not None:
                assert 0 <= bid.score <= 100

    def test_an_unknown_operation_is_nobodys(self) -> None:
        assert self.bid(FOREIGN, KernelRequest(self.device, "float32", {})) is None

    @pytest.mark.parametrize("op", list(KERNEL_OPS))
    def test_it_computes_what_the_reference_does(self, op: str) -> None:
        """Results, and arguments that are written in place, with optional arguments and without."""
        declared = KERNEL_OPS[op]
        for dtype, kernel in self.offered(declared):
            for args, optional in self.calls(declared, dtype):
                expected, found = copied(args), copied(args)
                want, got = declared.reference(*expected), kernel(*found)
                for result, y, x in _results(declared, got, want):
                    if result.partial and not optional and y.dim() > x.dim():
                        assert y.dtype == torch.float32 and y.is_contiguous()
                        y = y.sum(0).to(x.dtype)
                    self.compare(declared, y, x, dtype)
                for arg, y, x in zip(declared.args, found, expected, strict=True):
                    if arg.access == "write":
                        self.compare(declared, y, x, dtype)

    @pytest.mark.parametrize("op", [op.name for op in KERNEL_OPS.values() if op.args[0].strided])
    def test_rows_may_lie_apart(self, op: str) -> None:
        """A part of a wider tensor: what several layers compute at once is split."""
        declared = KERNEL_OPS[op]
        for dtype, kernel in self.offered(declared):
            for args, _ in self.calls(declared, dtype, rows=(2, 7)):
                first, *others = args
                wide = torch.cat((first, first.flip(0)), dim=-1)
                want = kernel(first.clone(), *copied(others))
                got = kernel(wide[:, : first.shape[1]], *copied(others))
                for _, y, x in _results(declared, got, want):
                    self.compare(declared, y, x, dtype)

    @pytest.mark.parametrize("op", list(KERNEL_OPS))
    def test_arguments_are_left_as_they_are(self, op: str) -> None:
        """Except those that are declared as overwritten."""
        declared = KERNEL_OPS[op]
        for dtype, kernel in self.offered(declared):
            for args, _ in self.calls(declared, dtype, rows=(7,)):
                before = copied(args)
                kernel(*args)
                for arg, value, was in zip(declared.args, args, before, strict=True):
                    if arg.access == "read" and isinstance(value, Tensor):
                        assert torch.equal(value, was), arg.name

    def offered(self, op: KernelOp) -> list[tuple[str, Callable[..., Any]]]:
        """The kernel by dtype. Skips if there is none."""
        bids = {
            dtype: self.bid(op.name, KernelRequest(self.device, dtype, op.small_sizes))
            for dtype in self.dtypes
            if dtype in op.dtypes
        }
        found = [(d, bid.load()) for d, bid in bids.items() if isinstance(bid, KernelOffer)]
        if not found:
            pytest.skip(f"does not offer {op.name} for {self.device.type}")
        return found

    def calls(
        self, op: KernelOp, dtype: str, rows: Sequence[int] = tuple(PARTIALS)
    ) -> Iterator[tuple[list[Any], bool]]:
        """Arguments on the device, and whether optional ones are among them."""
        has_optional = any(arg.optional for arg in op.args)
        for count in rows:
            sizes = {"rows": count, "partials": PARTIALS[count], "slots": count + 7}
            for optional in (True, False) if has_optional else (False,):
                args = example_args(
                    op, {**op.small_sizes, **sizes}, getattr(torch, dtype), count, optional=optional
                )
                yield [_moved(arg, self.device.type) for arg in args], optional

    def compare(self, op: KernelOp, got: Tensor, want: Tensor, dtype: str) -> None:
        assert got.shape == want.shape and got.dtype == want.dtype
        if not want.dtype.is_floating_point:
            assert torch.equal(got, want)
            return
        tolerance = FP8_TOLERANCE if want.dtype.itemsize == 1 else op.tolerance[dtype]
        torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance * 4)


def _results(op: KernelOp, got: Any, want: Any) -> Iterator[tuple[Arg, Tensor, Tensor]]:
    single = isinstance(want, Tensor)
    return zip(op.returns, [got] if single else got, [want] if single else want, strict=True)


def _moved(arg: Any, device: str) -> Any:
    if isinstance(arg, tuple):
        return tuple(_moved(part, device) for part in arg)
    return arg.to(device) if isinstance(arg, Tensor) else arg
