"""What replays steps that were captured, as whoever starts a runner may give it."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from treadle.api.step_types import SchedulerOutput
from treadle.sampling.features import Features

__all__ = ("CapturedStep", "StepGraphs")


class CapturedStep(Protocol):
    """A captured forward pass of some number of tokens, each of which is a row."""

    def columns(self, count: int) -> tuple[Tensor, Tensor]:
        """Return slots and positions of the first ``count`` rows, int64 ``[count]``, valid until the next."""


Captured = TypeVar("Captured", bound=CapturedStep)


class StepGraphs(Protocol[Captured]):
    """Whole steps, their sampling apart from their forward passes."""

    def find(self, step: SchedulerOutput) -> Captured | None:
        """Return the smallest captured step that has a row for each token, or ``None``."""

    def forward(self, captured: Captured, step: SchedulerOutput) -> Tensor:
        """Run it; return logits ``[tokens or sampled rows, vocab]``, valid until the next."""

    def sample(
        self,
        captured: Captured,
        rows: int,
        features: Features,
        masks: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Tensor:
        """Replay sampling after ``forward``. Return tokens ``[rows]``, from ``flag_invalid``, when the step has
        ended. ``masks`` are rows of the step, int64 ``[n]``, and their bitmasks, int32 ``[n, words]``."""
