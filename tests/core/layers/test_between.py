"""Kernels between ranks: used where all ranks can and get what they get without, else by none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.api.attention import KernelOffer, KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.models import Collective, ModelContext, Shared
from treadle.layers import LMHead, RMSNorm, ops
from treadle.layers.kernels import install_kernels
from treadle.testing.ranks import on_ranks

Context = Callable[..., ModelContext]
CUDA = DeviceInfo("cuda", (9, 0))
SIZE, VOCAB = 32, 97


class Sharing:
    """A rank that says that it shares memory; what is in it, nobody reads."""

    sum_limit = 6 * SIZE * 4 + 5
    """Six rows of float32, and no whole seventh."""
    shared = 0

    def __init__(self, ranks: Collective, shares: bool = True) -> None:
        self._ranks, self._shares = ranks, shares
        self.rank, self.size = ranks.rank, ranks.size
        self.all_reduce, self.all_gather = ranks.all_reduce, ranks.all_gather
        self.smallest = ranks.smallest
        self.asked: list[tuple[int, int]] = []

    def share(self, limit: int, units: int) -> Shared | None:
        self.asked.append((limit, units))
        if not self.smallest([int(self._shares)])[0]:
            return None
        places = torch.zeros(self.size, dtype=torch.int64)
        return Shared(places, torch.zeros(units, dtype=torch.int32), self.rank, limit)


class Offers:
    """Both operations by the ranks' own; ``wrong`` names one that does it wrongly on this rank,
    ``raises`` one that fails, ``absent`` one whose ``load`` does."""

    def __init__(self, ranks: Sharing, **faults: str) -> None:
        self.ranks, self.faults = ranks, faults
        self.rows: list[int] = []

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
        if op not in ("all_reduce_add_rms_norm", "all_gather"):
            return None
        assert request.shape["ranks"] == self.ranks.size
        assert request.shape.get("size", SIZE) == SIZE

        def load() -> Callable[..., Any]:
            if self.faults.get("absent") == op:
                raise ImportError("no compiler")
            return self.summed if op == "all_reduce_add_rms_norm" else self.gathered

        return KernelOffer("mine", 1, load)

    def summed(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float,
               places: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert len(counts) == 6 and len(x) <= 6 and len(places) == self.ranks.size
        self.rows.append(len(x))
        total = self.ranks.all_reduce(x)
        self.fail("all_reduce_add_rms_norm", total)
        return ops.fused_add_rms_norm(total, residual, weight, eps, offset)

    def gathered(self, x: Tensor, places: Tensor, counts: Tensor, rank: int, limit: int) -> Tensor:
        assert limit == 8 << 20 and len(counts) == 1024
        self.rows.append(len(x))
        y = self.ranks.all_gather(x)
        self.fail("all_gather", y)
        return y

    def fail(self, op: str, result: Tensor) -> None:
        if self.faults.get("raises") == op:
            raise RuntimeError("an illegal instruction")
        if self.faults.get("wrong") == op:
            result[-1] += 1


class Model(nn.Module):
    """A part of a sum, added and normalised, and a head."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.norm, self.first = RMSNorm(ctx, SIZE, 1e-5), RMSNorm(ctx, SIZE, 1e-5)
        self.norm.ranks = ctx.ranks
        self.head = LMHead(ctx, "head", SIZE, VOCAB)
        generator = torch.Generator().manual_seed(ctx.ranks.rank)
        self.norm.weight.data = torch.linspace(0.5, 2, SIZE)
        self.head.weight.data = torch.randn(self.head.weight.shape, generator=generator)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, total = self.norm(x, torch.ones_like(x))
        logits: Tensor = self.head(y)
        return logits, total


def parts(rank: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rows + rank)
    return torch.randn(rows, SIZE, generator=generator)


def test_what_fits_is_done_by_the_kernels(context: Context) -> None:
    def run(ranks: Collective) -> None:
        sharing = Sharing(ranks)
        model, offers = Model(context(ranks=sharing)), Offers(sharing)
        inputs = [parts(ranks.rank, rows) for rows in (1, 4, 6, 7)]
        wanted = [model(x.clone()) for x in inputs]
        served = install_kernels(model, offers, CUDA, "float32")
        assert served == {"all_reduce_add_rms_norm": "mine", "all_gather": "mine"}
        assert model.first.sum_op is None, "it sums nothing"
        size = model.head.out_features
        assert sharing.asked == [(6 * SIZE * 4, 6), (8 << 20, 1024)]
        for x, want in zip(inputs, wanted, strict=True):
            offers.rows.clear()
            for found, expected in zip(model(x.clone()), want, strict=True):
                assert torch.equal(found, expected)
            assert offers.rows == [len(x)] * ((len(x) <= 6) + 1)
        offers.rows.clear()
        sum_op, gather_op, rest = model.norm.sum_op, model.head.gather_op, (None, 1e-5, 0.0)
        assert sum_op is not None and gather_op is not None
        x, wide = inputs[1], torch.ones(4, size)
        for pair in (
            (x[::2], x[::2].clone()),  # not contiguous
            (x[::2].clone(), x[::2]),
            (x.half(), x.half()),
            (x, x[:2]),
            (x[:0], x[:0]),
            (x[:, :16].clone(), x[:, :16].clone()),  # not of this size
        ):
            assert sum_op(*pair, *rest) is None
        for one in wide.half(), wide[:0], wide[0], wide[:, :32], wide.t().contiguous().t():
            assert gather_op(one) is None
        assert not offers.rows

    on_ranks(2, run)


@pytest.mark.parametrize("op", ["all_reduce_add_rms_norm", "all_gather"])
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("wrong", "its result is wrong"),
        ("raises", "RuntimeError: an illegal instruction"),
        ("absent", "ImportError: no compiler"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_what_fails_on_one_rank_is_used_on_none(
    context: Context, caplog: pytest.LogCaptureFixture, op: str, fault: str, why: str, culprit: int
) -> None:
    def run(ranks: Collective) -> dict[str, str]:
        sharing = Sharing(ranks)
        model = Model(context(ranks=sharing))
        offers = Offers(sharing, **({fault: op} if ranks.rank == culprit else {}))
        x = parts(ranks.rank, 3)
        want = model(x.clone())
        served = install_kernels(model, offers, CUDA, "float32")
        offers.faults.clear()
        offers.rows.clear()
        for found, expected in zip(model(x.clone()), want, strict=True):
            assert torch.equal(found, expected)
        assert len(offers.rows) == 1, "the other operation is not concerned"
        return served

    with caplog.at_level(logging.INFO, "treadle.layers"):
        for served in on_ranks(2, run):
            assert served == dict.fromkeys({"all_reduce_add_rms_norm", "all_gather"} - {op}, "mine")
    reason = why if culprit == 0 else "another rank could not"
    assert [r.getMessage() for r in caplog.records] == [f"{op} is not used: {reason}"]


@pytest.mark.parametrize("reason", ["no memory", "no sums", "no cuda", "nobody offers"])
def test_without_shared_memory_or_an_offer_nothing_changes(context: Context, reason: str) -> None:
    def run(ranks: Collective) -> None:
        sharing = Sharing(ranks, shares=reason != "no memory" or ranks.rank == 0)
        if reason == "no sums":
            sharing.sum_limit = 0
        model, offers = Model(context(ranks=sharing)), Offers(sharing)
        if reason == "nobody offers":
            offers.kernel = lambda op, request: None  # type: ignore[method-assign]
        device = DeviceInfo("cpu") if reason == "no cuda" else CUDA
        assert install_kernels(model, offers, device, "float32") == {}
        assert model.norm.sum_op is None and model.head.gather_op is None
        assert bool(sharing.asked) == (reason == "no memory") and not offers.rows

    on_ranks(2, run)
