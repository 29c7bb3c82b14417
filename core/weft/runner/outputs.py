"""The results of a launched step on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.plan import StepResult, TokenLogprobs
from weft.sampling.logprobs import Logprobs, to_host
from weft.sampling.sampler import SampleOutput

__all__ = ("PendingStep",)


class PendingStep:
    """One launched step: copies to pinned memory were enqueued, ``result`` waits for them."""

    def __init__(self, step_id: int, device: torch.device) -> None:
        self._id = step_id
        self._cuda = device.type == "cuda"
        self._tokens: Tensor | None = None
        self._bad: Tensor | None = None
        self._logprobs: tuple[list[int], Logprobs] | None = None
        self._prompts: list[tuple[int, Logprobs]] = []
        self._event: torch.cuda.Event | None = None

    def sampled(self, output: SampleOutput, rows: list[int]) -> None:
        """``rows[i]`` is the plan's row of the i-th sampled token."""
        self._tokens = self._to_host(output.tokens)
        self._bad = self._to_host(output.bad)
        if output.logprobs is not None:
            which = [rows[i] for i in output.logprob_rows]
            self._logprobs = (which, output.logprobs.map(self._to_host))

    def prompt(self, row: int, logprobs: Logprobs) -> None:
        self._prompts.append((row, logprobs.map(self._to_host)))

    def _to_host(self, x: Tensor) -> Tensor:
        if not self._cuda:
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return host.copy_(x, non_blocking=True)

    def record(self) -> None:
        """Everything of this step is enqueued."""
        if self._cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logprobs is not None:
            rows, values = self._logprobs
            logprobs = dict(zip(rows, to_host(values), strict=True))
        bad = self._bad.nonzero().flatten().tolist() if self._bad is not None else []
        return StepResult(
            id=self._id,
            tokens=self._tokens.tolist() if self._tokens is not None else [],
            logprobs=logprobs,
            prompt_logprobs={row: to_host(values) for row, values in self._prompts},
            bad=bad,
        )
