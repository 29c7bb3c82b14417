"""The results of a launched step on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.plan import StepResult, TokenLogprobs
from weft.sampling.logprobs import Logprobs

__all__ = ("PendingStep", "marked")


def marked(tokens: Tensor, bad: Tensor, out: Tensor | None = None) -> Tensor:
    """``tokens``, negative where ``bad``: one tensor to copy, made by one kernel."""
    return torch.add(tokens, bad, alpha=-(1 << 40), out=out)


class PendingStep:
    """One launched step: its copies to the host are enqueued, ``result`` waits for them.

    On CUDA they are made on ``copies``, a stream of their own, so that the next step need not wait.
    """

    def __init__(self, step_id: int, copies: torch.cuda.Stream | None) -> None:
        self._id = step_id
        self._copies = copies
        self.slots: list[int] = []
        self._rows: list[int] = []
        self._tokens: Tensor | None = None
        self._logprobs: Logprobs | None = None
        self._prompts: list[tuple[int, Logprobs]] = []
        self.faults: dict[int, str] = {}
        """By index into the tokens: rows that a logits processor failed on."""
        self.edited: dict[int, list[str]] = {}
        """By index into the tokens: the logits processors that a row has gone through."""
        self._event = torch.cuda.Event() if copies is not None else None
        self._source: Tensor | None = None
        """What is being copied: its memory must not be given to others before that is done."""

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
        self._source = tokens
        self._after_the_step()
        with torch.cuda.stream(self._copies):
            # A copy that need not wait goes to pinned memory (torch sees to that).
            self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.cpu()

    def prompt(self, row: int, logprobs: Logprobs) -> None:
        self._prompts.append((row, logprobs.cpu()))

    def record(self) -> None:
        """Everything of this step is enqueued."""
        self._after_the_step()
        if self._event is not None:
            self._event.record(self._copies)

    def _after_the_step(self) -> None:
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))

    def keep(self) -> None:
        """What is enqueued from here on may overwrite the step's results: let it wait for the copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

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
