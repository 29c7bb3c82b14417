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

    def bid(self, device: DeviceInfo, world_size: int) -> CommunicatorOffer | Refusal | None:
        plugins = self.host()
        hooks: Any = plugins.hooks_for(self.kind, self.key)
        bids: list[CommunicatorOffer | Refusal] = hooks.treadle_communicator(
            request=CommunicatorRequest(device, world_size),
            options=plugins.options(self.kind, self.key),
        )
        return next((bid for bid in bids if bid.name == self.key), None)

    @pytest.mark.parametrize("world_size", [1, 2, 8])
    @pytest.mark.parametrize("kind", ["cpu", "cuda", "abacus"])
    def test_a_bid_is_an_offer_or_says_why_not(self, kind: str, world_size: int) -> None:
        bid = self.bid(DeviceInfo(kind, (3, 5) if kind == "cuda" else None), world_size)
        if isinstance(bid, CommunicatorOffer):
            assert 0 <= bid.score <= 100
        else:
            assert bid is not None and bid.reasons and all(r.strip() for r in bid.reasons)

    def on_all_ranks(self, work: Work) -> None:
        """Fail with what ``work`` reports on any rank. Skips if CPUs are refused."""
        import torch

        from treadle.testing.ranks import run_on_ranks

        offer = self.bid(DeviceInfo("cpu"), self.world_size)
        if not isinstance(offer, CommunicatorOffer):
            pytest.skip("it does not serve CPUs")

        def run(base: Communicator) -> list[str]:
            return work(offer.create(base, torch.device("cpu")), base)

        assert run_on_ranks(self.world_size, run) == [[]] * self.world_size

    def test_ranks_keep_their_places(self) -> None:
        def work(communicator: Communicator, base: Communicator) -> list[str]:
            wrong = [
                f"{name} is {getattr(communicator, name)}"
                for name in ("rank", "world_size")
                if getattr(communicator, name) != getattr(base, name)
            ]
            if communicator.memory_bytes < base.memory_bytes:
                wrong.append(f"memory_bytes is {communicator.memory_bytes}")
            return wrong

        self.on_all_ranks(work)

    def test_it_sums(self) -> None:
        """Tensors of any size and dtype; the argument may be overwritten."""
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
            found = communicator.all_reduce_min([base.rank, 7 - base.rank, -(1 << 40)])
            want = [0, 8 - self.world_size, -(1 << 40)]
            return [] if found == want else [f"the smallest are {found}, not {want}"]

        self.on_all_ranks(work)

    @pytest.mark.parametrize("op", ["all_reduce_add_rms_norm", "all_gather"])
    def test_fused_operations_equal_their_references(self, op: str) -> None:
        """For arguments that are supported, in turns of several sizes. Skips without the operation."""
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
            declared, wrong = COMMUNICATOR_OPS[op], []
            for rows in (1, 5, 2):
                sizes = {"rows": rows, "size": 64}
                args = example_args(declared, sizes, torch.float32, 9 * base.rank + rows)
                found = fused.run(*copied(args))
                if found is None:
                    continue
                supported.append(rows)
                want = declared.reference(base, *copied(args))
                pairs = (
                    zip(found, want, strict=True) if isinstance(want, tuple) else [(found, want)]
                )
                if not all(torch.allclose(y, x, rtol=1e-4, atol=1e-4) for y, x in pairs):
                    wrong.append(f"{op} of {rows} rows is wrong")
            return wrong

        self.on_all_ranks(work)
        if not supported:
            pytest.skip(f"does not have {op}")


def _tensors(rank: int) -> Iterator[Tensor]:
    """Whole numbers, so that the order of a sum does not matter."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((1,), (3, 7), (2, 4, 8), (64, 128)):
            count = torch.Size(shape).numel()
            yield ((torch.arange(count) * 7 + 3 * rank) % 31).to(dtype).view(shape)
