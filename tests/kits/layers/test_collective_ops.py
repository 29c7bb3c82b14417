"""Fused operations between ranks: used if all ranks have one that equals its reference, else by none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.api.attention import KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.communicators import Communicator
from treadle.api.models import ModelContext
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import LMHead, RMSNorm, ops
from treadle_worker_kit.fusion import apply_fusions

Context = Callable[..., ModelContext]
SIZE, VOCAB, ROWS = 32, 97, 6


class Fusing:
    """A communicator with both operations, for up to ``ROWS`` rows. ``wrong`` names one that computes
    something else on this rank, ``raises`` one that fails, ``absent`` one that cannot be created."""

    name, memory_bytes = "mine", 0

    def __init__(self, base: Communicator, **faults: str) -> None:
        self.base, self.faults = base, faults
        self.rank, self.world_size = base.rank, base.world_size
        self.all_reduce, self.all_gather = base.all_reduce, base.all_gather
        self.all_reduce_min = base.all_reduce_min
        self.created: list[tuple[str, int]] = []
        self.rows: list[int] = []

    def create_fused_op(self, op: str, size: int, dtype: torch.dtype) -> Any:
        self.created.append((op, size))
        if self.faults.get("absent") == op:
            raise ImportError("no compiler")
        run = {"all_reduce_add_rms_norm": self.fused_norm, "all_gather": self.gather}[op]
        return SimpleNamespace(run=run)

    def fused_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor] | None:
        if len(x) > ROWS:
            return None
        self.rows.append(len(x))
        total = self.base.all_reduce(x)
        self.fail("all_reduce_add_rms_norm", total)
        return ops.fused_add_rms_norm(total, residual, weight, eps, offset)

    def gather(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        y = self.base.all_gather(x)
        self.fail("all_gather", y)
        return y

    def fail(self, op: str, result: Tensor) -> None:
        if self.faults.get("raises") == op:
            raise RuntimeError("an illegal instruction")
        if self.faults.get("wrong") == op:
            result[-1] += 1


class Model(nn.Module):
    """A summand, added and normalised, and a head."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.norm, self.first = RMSNorm(ctx, SIZE, 1e-5), RMSNorm(ctx, SIZE, 1e-5)
        self.norm.tp_group = ctx.tp_group
        self.head = LMHead(ctx, "head", SIZE, VOCAB)
        generator = torch.Generator().manual_seed(ctx.tp_group.rank)
        self.norm.weight.data = torch.linspace(0.5, 2, SIZE)
        self.head.weight.data = torch.randn(self.head.weight.shape, generator=generator)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, total = self.norm(x, torch.ones_like(x))
        logits: Tensor = self.head(y)
        return logits, total


def installed(model: nn.Module) -> dict[str, str]:
    return apply_fusions(model, Nothing().kernel, DeviceInfo("cpu"), "float32").backends


class Nothing:
    """Plugins that offer no kernel."""

    def kernel(self, op: str, request: KernelRequest) -> None:
        return None


def summand(rank: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rows + rank)
    return torch.randn(rows, SIZE, generator=generator)


def test_what_is_supported_is_done_by_the_kernels(context: Context) -> None:
    def run(base: Communicator) -> None:
        fusing = Fusing(base)
        model = Model(context(ranks=fusing))
        inputs = [summand(base.rank, rows) for rows in (1, 4, 6, 7)]
        references = [model(x.clone()) for x in inputs]
        served = installed(model)
        assert served == {"all_reduce_add_rms_norm": "mine", "all_gather": "mine"}
        assert model.first.all_reduce_op is None, "it sums nothing"
        assert fusing.created == [
            ("all_reduce_add_rms_norm", SIZE),
            ("all_gather", model.head.out_features),
        ]
        sums, gathers = fusing.rows[:3], fusing.rows[3:]
        assert sums[0] == 1 and 3 < sums[1] <= ROWS and sums[2] == 3, "the largest size is tried"
        assert gathers[0] == 1 and gathers[1] > 1000 and gathers[2] == 3
        for x, reference in zip(inputs, references, strict=True):
            fusing.rows.clear()
            for actual, expected in zip(model(x.clone()), reference, strict=True):
                assert torch.equal(actual, expected)
            assert fusing.rows == [len(x)] * ((len(x) <= ROWS) + 1)

    run_on_ranks(2, run)


@pytest.mark.parametrize("op", ["all_reduce_add_rms_norm", "all_gather"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong", "its result is wrong"),
        ("raises", "RuntimeError: an illegal instruction"),
        ("absent", "ImportError: no compiler"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_what_fails_on_one_rank_is_used_on_none(
    context: Context,
    caplog: pytest.LogCaptureFixture,
    op: str,
    fault: str,
    message: str,
    culprit: int,
) -> None:
    def run(base: Communicator) -> dict[str, str]:
        fusing = Fusing(base, **({fault: op} if base.rank == culprit else {}))
        model = Model(context(ranks=fusing))
        x = summand(base.rank, 3)
        reference = model(x.clone())
        served = installed(model)
        fusing.faults.clear()
        fusing.rows.clear()
        for actual, expected in zip(model(x.clone()), reference, strict=True):
            assert torch.equal(actual, expected)
        assert len(fusing.rows) == 1, "the other operation is not concerned"
        return served

    with caplog.at_level(logging.INFO, "treadle_layers_kit"):
        for served in run_on_ranks(2, run):
            assert served == dict.fromkeys({"all_reduce_add_rms_norm", "all_gather"} - {op}, "mine")
    reason = message if culprit == 0 else "another rank could not"
    assert [r.getMessage() for r in caplog.records] == [f"{op} is not used: {reason}"]


class Compiling(Fusing):
    """Compiles before it runs, for which ``broken`` has no compiler on this rank."""

    def __init__(
        self, base: Communicator, compiled: set[tuple[int, str, int]], broken: str
    ) -> None:
        super().__init__(base)
        self.compiled, self.broken, self.is_dry_run = compiled, broken, False

    def set_dry_run(self, enabled: bool) -> None:
        self.is_dry_run = enabled

    def fused_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor] | None:
        if self.compiles("all_reduce_add_rms_norm", x):
            return (x, residual) if len(x) <= ROWS else None
        return super().fused_norm(x, residual, weight, eps, offset)

    def gather(self, x: Tensor) -> Tensor:
        return x if self.compiles("all_gather", x) else super().gather(x)

    def compiles(self, op: str, x: Tensor) -> bool:
        if self.is_dry_run:
            if self.broken == op:
                raise OSError("no compiler")
            self.compiled.add((self.rank, op, len(x)))
        else:
            ranks = {rank for rank, name, rows in self.compiled if (name, rows) == (op, len(x))}
            assert len(ranks) == self.world_size, "it runs before all ranks have compiled it"
        return self.is_dry_run


@pytest.mark.parametrize("broken", ["", "all_reduce_add_rms_norm", "all_gather"])
def test_no_rank_runs_what_another_one_cannot_compile(context: Context, broken: str) -> None:
    compiled: set[tuple[int, str, int]] = set()

    def run(base: Communicator) -> tuple[dict[str, str], bool]:
        fusing = Compiling(base, compiled, broken if base.rank == 1 else "")
        return installed(Model(context(ranks=fusing))), fusing.is_dry_run

    served = dict.fromkeys({"all_reduce_add_rms_norm", "all_gather"} - {broken}, "mine")
    assert run_on_ranks(2, run) == [(served, False)] * 2


@pytest.mark.parametrize("reason", ["not offered", "no ability", "unsupported"])
def test_without_such_operations_nothing_changes(context: Context, reason: str) -> None:
    def run(base: Communicator) -> None:
        fusing: Any = base if reason == "no ability" else Fusing(base)
        if reason == "not offered":
            fusing.create_fused_op = lambda op, size, dtype: None
        if reason == "unsupported":
            fusing.create_fused_op = lambda op, size, dtype: SimpleNamespace(run=lambda *args: None)
        model = Model(context(ranks=fusing))
        assert installed(model) == {}
        assert model.norm.all_reduce_op is None and model.head.gather_op is None

    run_on_ranks(2, run)
