"""The conformance suite of kernels: what is offered computes the declared operation.

::

    class TestMine(PluginSuite, KernelSuite):
        plugin = "kernel_ops:mine"
        device = DeviceInfo("cuda", (9, 0))     # the device to offer for and to run on

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
from treadle.testing.kernel_examples import copied, example_args
from treadle.testing.kernel_ops import KERNEL_OPS, require_layer_ops
from treadle.testing.plugin import FOREIGN, PluginTest
from treadle_layers_kit.kernel_op import Arg, KernelOp

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("KernelSuite",)

require_layer_ops()  # without them most of the cases would silently be missing

PARTIALS = {1: 1, 2: 2, 7: 5, 33: 3, 100: 2}
"""How many partial sums there are, by number of rows."""
FP8_TOLERANCE = 0.13
"""One step of the three bits of a float8_e4m3fn."""


class KernelSuite(PluginTest):
    """Requests an offer for every operation, and runs the offered kernels with several row counts."""

    device: ClassVar[DeviceInfo] = DeviceInfo("cpu")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    def offer_or_refusal(self, op: str, request: KernelRequest) -> KernelOffer | Refusal | None:
        """Return the backend's answer. An exception fails the test; an engine treats it as a refusal."""
        plugins = self._cached_plugins
        hooks: Any = plugins.hooks_for(self.kind, self.key)
        options = plugins.options(self.kind, self.key)
        answers: list[KernelOffer | Refusal] = hooks.treadle_kernel_op(
            op=op, request=request, options=options
        )
        return next((answer for answer in answers if answer.name == self.key), None)

    @cached_property
    def _cached_plugins(self) -> PluginManager:
        return self.plugin_manager()

    @pytest.mark.parametrize("op", list(KERNEL_OPS))
    @pytest.mark.parametrize("kind", ["cpu", "cuda", "abacus"])
    def test_an_answer_is_an_offer_or_says_why_not(self, op: str, kind: str) -> None:
        device = DeviceInfo(kind, (3, 5) if kind == "cuda" else None)
        for dtype in (*self.dtypes, "int3"):
            answer = self.offer_or_refusal(
                op, KernelRequest(device, dtype, KERNEL_OPS[op].small_sizes)
            )
            if isinstance(answer, Refusal):
                assert answer.reasons and all(reason.strip() for reason in answer.reasons)
            elif answer is not None:
                assert 0 <= answer.score <= 100

    def test_an_unknown_operation_is_nobodys(self) -> None:
        assert self.offer_or_refusal(FOREIGN, KernelRequest(self.device, "float32", {})) is None

    @pytest.mark.parametrize("op", list(KERNEL_OPS))
    def test_it_computes_what_the_reference_does(self, op: str) -> None:
        """Compare results and arguments written in place, with and without optional arguments."""
        kernel_op = KERNEL_OPS[op]
        for dtype, kernel in self.offered(kernel_op):
            for args, optional in self.calls(kernel_op, dtype):
                expected, kernel_args = copied(args), copied(args)
                reference, actual = kernel_op.reference(*expected), kernel(*kernel_args)
                for result, y, x in _results(kernel_op, actual, reference):
                    if result.partial and not optional and y.dim() > x.dim():
                        assert y.dtype == torch.float32 and y.is_contiguous()
                        y = y.sum(0).to(x.dtype)
                    self.compare(kernel_op, y, x, dtype)
                for arg, y, x in zip(kernel_op.args, kernel_args, expected, strict=True):
                    if arg.access == "write":
                        self.compare(kernel_op, y, x, dtype)

    @pytest.mark.parametrize("op", [op.name for op in KERNEL_OPS.values() if op.args[0].strided])
    def test_rows_may_lie_apart(self, op: str) -> None:
        """An argument may be a slice of a wider tensor: the output of a fused layer is split."""
        kernel_op = KERNEL_OPS[op]
        for dtype, kernel in self.offered(kernel_op):
            for args, _ in self.calls(kernel_op, dtype, rows=(2, 7)):
                first, *other_args = args
                wide_input = torch.cat((first, first.flip(0)), dim=-1)
                expected = kernel(first.clone(), *copied(other_args))
                actual = kernel(wide_input[:, : first.shape[1]], *copied(other_args))
                for _, y, x in _results(kernel_op, actual, expected):
                    self.compare(kernel_op, y, x, dtype)

    @pytest.mark.parametrize("op", list(KERNEL_OPS))
    def test_arguments_are_left_as_they_are(self, op: str) -> None:
        """Except those that are declared as overwritten."""
        kernel_op = KERNEL_OPS[op]
        for dtype, kernel in self.offered(kernel_op):
            for args, _ in self.calls(kernel_op, dtype, rows=(7,)):
                copies = copied(args)
                kernel(*args)
                for arg, value, original in zip(kernel_op.args, args, copies, strict=True):
                    if arg.access == "read" and isinstance(value, Tensor):
                        assert torch.equal(value, original), arg.name

    def offered(self, op: KernelOp) -> list[tuple[str, Callable[..., Any]]]:
        """Return the offered kernel of each dtype. Skips if there is none."""
        answers = {
            dtype: self.offer_or_refusal(op.name, KernelRequest(self.device, dtype, op.small_sizes))
            for dtype in self.dtypes
            if dtype in op.dtypes
        }
        kernels = [
            (d, answer.load()) for d, answer in answers.items() if isinstance(answer, KernelOffer)
        ]
        if not kernels:
            pytest.skip(f"does not offer {op.name} for {self.device.type}")
        return kernels

    def calls(
        self, op: KernelOp, dtype: str, rows: Sequence[int] = tuple(PARTIALS)
    ) -> Iterator[tuple[list[Any], bool]]:
        """Yield arguments on the device, and whether they include the optional ones."""
        has_optional = any(arg.optional for arg in op.args)
        for count in rows:
            sizes = {"rows": count, "partials": PARTIALS[count], "slots": count + 7}
            for optional in (True, False) if has_optional else (False,):
                args = example_args(
                    op, {**op.small_sizes, **sizes}, getattr(torch, dtype), count, optional=optional
                )
                yield [_moved(arg, self.device.type) for arg in args], optional

    def compare(self, op: KernelOp, actual: Tensor, expected: Tensor, dtype: str) -> None:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        if not expected.dtype.is_floating_point:
            assert torch.equal(actual, expected)
            return
        tolerance = FP8_TOLERANCE if expected.dtype.itemsize == 1 else op.tolerance[dtype]
        torch.testing.assert_close(
            actual.float(), expected.float(), rtol=tolerance, atol=tolerance * 4
        )


def _results(op: KernelOp, actual: Any, expected: Any) -> Iterator[tuple[Arg, Tensor, Tensor]]:
    is_single = isinstance(expected, Tensor)
    return zip(
        op.returns,
        [actual] if is_single else actual,
        [expected] if is_single else expected,
        strict=True,
    )


def _moved(arg: Any, device: str) -> Any:
    if isinstance(arg, tuple):
        return tuple(_moved(item, device) for item in arg)
    return arg.to(device) if isinstance(arg, Tensor) else arg
