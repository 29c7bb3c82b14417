"""The results of a launched step on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.api.step_types import StepResult, TokenLogprobs
from treadle.sampling.logprobs import Logprobs

__all__ = ("PendingStep", "marked")


def marked(tokens: Tensor, bad: Tensor) -> Tensor:
    """``tokens``, negative where ``bad``: one tensor to copy, made by one kernel."""
    return torch.add(tokens, bad, alpha=-(1 << 40))


class PendingStep:
    """One launched step: its copies to the host are enqueued, ``result`` waits for them.

    They are in the step's own stream. Another one, that waits for the step to end, was tried: as long as
    it waits the device takes 0.3 us more from each kernel of a graph to the next.
    """

    def __init__(self, step_id: int, device: torch.device) -> None:
        self._id = step_id
        self.slots: list[int] = []
        self._rows: list[int] = []
        self._tokens: Tensor | None = None
        self._logprobs: Logprobs | None = None
        self._prompts: list[tuple[int, Logprobs]] = []
        self.faults: dict[int, str] = {}
        """By index into the tokens: rows that a logits processor failed on."""
        self.edited: dict[int, list[str]] = {}
        """By index into the tokens: the logits processors that a row has gone through."""
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def sampled(
        self,
        rows: list[int],
        slots: list[int],
        tokens: Tensor,
        logprobs: Logprobs | None = None,
    ) -> None:
        """``tokens[i]``, as from ``marked``, is of row ``rows[i]`` of the plan, in ``slots[i]``."""
        self._rows = rows
        self.slots = slots
        # A copy that need not wait goes to pinned memory (torch sees to that).
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.cpu()

    def prompt(self, row: int, logprobs: Logprobs) -> None:
        self._prompts.append((row, logprobs.cpu()))

    def record(self) -> None:
        """Everything of this step is enqueued."""
        if self._event is not None:
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logprobs is not None:
            rows = (self._rows[i] for i in self._logprobs.rows)
            logprobs = dict(zip(rows, self._logprobs.to_host(), strict=True))
        tokens: list[int] = self._tokens.tolist() if self._tokens is not None else []
        bad = [i for i, token in enumerate(tokens) if token < 0]
        return StepResult(
            id=self._id,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs={row: values.to_host() for row, values in self._prompts},
            bad=sorted({*bad, *self.faults}),
            faults=self.faults,
        )
