"""Fused operations between ranks, where the communicator has them.

Each is used on all ranks or on none, and only after all ranks have compared it with its reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from treadle.api.communicators import Communicator, SupportsFusedOps
from treadle_layers_kit.collective import dry_run
from treadle_layers_kit.kernel_op import KernelOp
from treadle_layers_kit.kernel_ops import ALL_GATHER

__all__ = ("SharedKernels", "collective_op_owner", "create_collective_op")

log = logging.getLogger(__name__)

Kernel = Callable[..., Any]
SharedKernels = dict[tuple[int, torch.dtype], Kernel | None]
"""By the features and the type of what they sum: kernels that several layers share."""
CHECKED_BYTES = 16 << 20
"""Bytes of the largest arguments that are tried: more than the programs of a kernel have at once."""


class Outcome(IntEnum):
    """Of one check; the worst first."""

    WRONG = 0
    UNSUPPORTED = 1
    RIGHT = 2


def create_collective_op(
    op: KernelOp, communicator: Communicator, size: int, dtype: torch.dtype, device: torch.device
) -> Kernel | None:
    """Return the communicator's kernel, if all ranks have one that passes all checks.

    The ranks agree after each step that can fail, so that none waits for one that gave up. Collective.
    """
    if not isinstance(communicator, SupportsFusedOps):
        return None
    kernel = reason = None
    try:
        fused = communicator.create_fused_op(op.name, size, dtype)
        kernel = fused.run if fused is not None else None
    except Exception as error:  # a plugin's
        reason = f"{type(error).__name__}: {error}"
    exists = communicator.all_reduce_min([int(kernel is not None)])[0]
    if kernel is not None and exists:
        check = _Check(op, communicator, kernel, size, dtype, device)
        if check.passes():
            return kernel
        reason = check.reason
    if communicator.rank == 0 and (kernel is not None or reason is not None):
        log.info("%s is not used: %s", op.name, reason or "another rank could not")
    return None


def collective_op_owner(
    op: KernelOp, communicator: Communicator, kernel: Kernel | None
) -> dict[str, str]:
    """Return the communicator's name by operation, if it has the kernel."""
    if kernel is None or not isinstance(communicator, SupportsFusedOps):
        return {}
    return {op.name: communicator.name}


class _Check:
    """Compares a kernel with the reference of its operation, on all ranks at once.

    ``reason`` is why it failed on this rank; ``None`` if it did not.
    """

    def __init__(
        self,
        op: KernelOp,
        communicator: Communicator,
        kernel: Kernel,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._op, self._communicator, self._kernel = op, communicator, kernel
        self._size, self._dtype, self._device = size, dtype, device
        self.reason: str | None = None

    @torch.inference_mode()
    def passes(self) -> bool:
        """Try one row, about as many as the kernel supports, and three."""
        outcome = self._run(1)
        if outcome is Outcome.UNSUPPORTED:
            self.reason = "it does not support a single row"
        if outcome is not Outcome.RIGHT:
            return False
        rows = max(1, CHECKED_BYTES // (self._size * self._dtype.itemsize))
        while (outcome := self._run(rows)) is Outcome.UNSUPPORTED:
            rows //= 2
        return outcome is Outcome.RIGHT and self._run(min(3, rows)) is Outcome.RIGHT

    def _run(self, rows: int) -> Outcome:
        """Return the worst outcome of any rank.

        No rank runs the kernel before all have compiled it: they would wait for one that cannot.
        """
        args = self._args(rows)
        with dry_run(self._communicator) as compiles:
            outcome = self._call(args)[0] if compiles else Outcome.RIGHT
        if compiles:
            outcome = self._agree(outcome)
        if outcome is not Outcome.RIGHT:
            return outcome
        outcome, results = self._call(args)
        outcome = self._agree(outcome)
        if outcome is not Outcome.RIGHT:
            return outcome
        expected = self._op.reference(self._communicator, *_clones(args))
        if not self._close(results, expected):
            self.reason, outcome = "its result is wrong", Outcome.WRONG
        return self._agree(outcome)

    def _call(self, args: list[Any]) -> tuple[Outcome, Any]:
        """Return the outcome on this rank, and the results if they are still to be compared."""
        try:
            results = self._kernel(*_clones(args))
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            return Outcome.WRONG, None
        return (Outcome.UNSUPPORTED if results is None else Outcome.RIGHT), results

    def _args(self, rows: int) -> list[Any]:
        """Whole numbers that every dtype holds, so that the order of a sum does not matter."""
        x = self._whole(rows, 251 if self._op is ALL_GATHER else 13) - self._communicator.rank
        if self._op is ALL_GATHER:
            return [x]
        return [x, self._whole(rows, 7), self._whole(1, 3)[0] + 1, 1e-6, 0.0]

    def _whole(self, rows: int, limit: int) -> Tensor:
        numbers = torch.arange(rows * self._size, device=self._device) % limit
        return numbers.to(self._dtype).view(rows, self._size)

    def _agree(self, outcome: Outcome) -> Outcome:
        return Outcome(self._communicator.all_reduce_min([outcome])[0])

    def _close(self, results: Any, expected: Any) -> bool:
        pairs = (
            [(results, expected)]
            if isinstance(results, Tensor)
            else zip(results, expected, strict=True)
        )
        return all(
            torch.allclose(actual, expected_y, rtol=tolerance, atol=tolerance)
            for (actual, expected_y), tolerance in zip(pairs, self._tolerances(), strict=True)
        )

    def _tolerances(self) -> list[float]:
        # The order in which a norm adds squares is free in every dtype.
        return [0.0 if result.exact else 2e-2 for result in self._op.returns]


def _clones(args: list[Any]) -> list[Any]:
    """Operations may overwrite their arguments."""
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
