"""The conformance suite of communicators: the results of the base communicator, however computed.

::

    class TestMine(PluginSuite, CommunicatorSuite):
        plugin = "communicators:mine"

The ranks are threads of one process, on CPUs; what needs several GPUs is for the plugin's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.cache import DeviceInfo
from treadle.api.communicators import (
    Communicator,
    CommunicatorOffer,
    CommunicatorRequest,
    SupportsDryRun,
    SupportsFusedOps,
)
from treadle.api.types import Refusal
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("CommunicatorSuite",)

Work = Callable[[Communicator, Communicator], list[str]]
"""``(communicator, base)`` to what is wrong."""


class CommunicatorSuite(PluginTest):
    """Creates the communicator on several ranks, if it offers to serve CPUs."""

    world_size: ClassVar[int] = 3

    def offer_or_refusal(
        self, device: DeviceInfo, world_size: int
    ) -> CommunicatorOffer | Refusal | None:
        plugins = self.plugin_manager()
        hooks: Any = plugins.hooks_for(self.kind, self.key)
        answers: list[CommunicatorOffer | Refusal] = hooks.treadle_communicator(
            request=CommunicatorRequest(device, world_size),
            options=plugins.options(self.kind, self.key),
        )
        return next((answer for answer in answers if answer.name == self.key), None)

    @pytest.mark.parametrize("world_size", [1, 2, 8])
    @pytest.mark.parametrize("kind", ["cpu", "cuda", "abacus"])
    def test_an_answer_is_an_offer_or_says_why_not(self, kind: str, world_size: int) -> None:
        answer = self.offer_or_refusal(
            DeviceInfo(kind, (3, 5) if kind == "cuda" else None), world_size
        )
        if isinstance(answer, CommunicatorOffer):
            assert 0 <= answer.score <= 100
        else:
            assert (
                answer is not None
                and answer.reasons
                and all(reason.strip() for reason in answer.reasons)
            )

    def on_all_ranks(self, work: Work) -> None:
        """Run ``work`` on all ranks and fail with its errors. Skips if CPUs are refused."""
        import torch

        from treadle.testing.ranks import run_on_ranks

        offer = self.offer_or_refusal(DeviceInfo("cpu"), self.world_size)
        if not isinstance(offer, CommunicatorOffer):
            pytest.skip("it does not serve CPUs")

        def run(base: Communicator) -> list[str]:
            return work(offer.create(base, torch.device("cpu")), base)

        assert run_on_ranks(self.world_size, run) == [[]] * self.world_size

    def test_ranks_keep_their_places(self) -> None:
        def work(communicator: Communicator, base: Communicator) -> list[str]:
            problems = [
                f"{name} is {getattr(communicator, name)}"
                for name in ("rank", "world_size")
                if getattr(communicator, name) != getattr(base, name)
            ]
            if communicator.memory_bytes < base.memory_bytes:
                problems.append(f"memory_bytes is {communicator.memory_bytes}")
            return problems

        self.on_all_ranks(work)

    def test_it_sums(self) -> None:
        """Sum tensors of any size and dtype; the argument may be overwritten."""
        import torch

        def work(communicator: Communicator, base: Communicator) -> list[str]:
            return [
                f"the sum of {list(x.shape)} {x.dtype} is wrong"
                for x in _tensors(base.rank)
                if not torch.equal(communicator.all_reduce(x.clone()), base.all_reduce(x.clone()))
            ]

        self.on_all_ranks(work)

    def test_it_gathers_in_rank_order(self) -> None:
        import torch

        def work(communicator: Communicator, base: Communicator) -> list[str]:
            return [
                f"the gather of {list(x.shape)} along {dim} is wrong"
                for x in _tensors(base.rank)
                for dim in (-1, 0)
                if not torch.equal(communicator.all_gather(x, dim), base.all_gather(x, dim))
            ]

        self.on_all_ranks(work)

    def test_ranks_agree_on_the_smallest(self) -> None:
        def work(communicator: Communicator, base: Communicator) -> list[str]:
            actual = communicator.all_reduce_min([base.rank, 7 - base.rank, -(1 << 40)])
            expected = [0, 8 - self.world_size, -(1 << 40)]
            return [] if actual == expected else [f"the smallest are {actual}, not {expected}"]

        self.on_all_ranks(work)

    def test_a_dry_run_needs_no_other_rank(self) -> None:
        """Results have the right shapes. Skips without the ability."""
        import torch

        able: list[bool] = []

        def work(communicator: Communicator, base: Communicator) -> list[str]:
            if not isinstance(communicator, SupportsDryRun):
                return []
            able.append(True)
            wrong = []
            for x in _tensors(base.rank) if base.rank == 0 else ():
                communicator.set_dry_run(True)
                gathered = (communicator.world_size * x.shape[0], *x.shape[1:])
                for y, shape in (
                    (communicator.all_reduce(x.clone()), x.shape),
                    (communicator.all_gather(x, 0), gathered),
                ):
                    if y.shape != shape or y.dtype != x.dtype or not y.isfinite().all():
                        wrong.append(f"the dry run returns {list(y.shape)} {y.dtype}")
                communicator.set_dry_run(False)
            x = torch.full((4, 8), float(base.rank))
            if not torch.equal(communicator.all_reduce(x.clone()), base.all_reduce(x.clone())):
                wrong.append("a sum after the dry run is wrong")
            return wrong

        self.on_all_ranks(work)
        if not able:
            pytest.skip("it does not compile ahead")

    @pytest.mark.parametrize("op", ["all_reduce_add_rms_norm", "all_gather"])
    def test_fused_operations_equal_their_references(self, op: str) -> None:
        """Compare supported arguments of several sizes. Skips if no fused operation is offered."""
        import torch

        from treadle.testing.kernel_examples import copied, example_args
        from treadle.testing.kernel_ops import COMMUNICATOR_OPS, require_layer_ops

        supported: list[int] = []

        def work(communicator: Communicator, base: Communicator) -> list[str]:
            fused = None
            if isinstance(communicator, SupportsFusedOps):
                fused = communicator.create_fused_op(op, 64, torch.float32)
            if fused is None:
                return []
            require_layer_ops()
            kernel_op, problems = COMMUNICATOR_OPS[op], []
            for rows in (1, 5, 2):
                sizes = {"rows": rows, "size": 64}
                args = example_args(kernel_op, sizes, torch.float32, 9 * base.rank + rows)
                actual = fused.run(*copied(args))
                if actual is None:
                    continue
                supported.append(rows)
                expected = kernel_op.reference(base, *copied(args))
                pairs = (
                    zip(actual, expected, strict=True)
                    if isinstance(expected, tuple)
                    else [(actual, expected)]
                )
                if not all(torch.allclose(y, x, rtol=1e-4, atol=1e-4) for y, x in pairs):
                    problems.append(f"{op} of {rows} rows is wrong")
            return problems

        self.on_all_ranks(work)
        if not supported:
            pytest.skip(f"does not have {op}")


def _tensors(rank: int) -> Iterator[Tensor]:
    """Return tensors of whole numbers, so that the order of a sum does not matter."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((1,), (3, 7), (2, 4, 8), (64, 128)):
            count = torch.Size(shape).numel()
            yield ((torch.arange(count) * 7 + 3 * rank) % 31).to(dtype).view(shape)
